// Package bench is what experiments share: variants that run interleaved, paired statistics with a verdict, and reports.
//
// An [Experiment] reproduces a published claim as one or more [Comparison]s of a variant A with a variant B. Both run in one
// process, in turns A B B A, so that whatever drifts on the machine meets both. The result is the ratio of A's cost to B's over
// all pairs, with a 95 % interval, and is judged by the interval's lower end: a claim holds only if that reaches the target.
package bench
