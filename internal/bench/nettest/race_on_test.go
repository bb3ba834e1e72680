//go:build race

package nettest

// pace divides the frames of a test: the race detector makes each many times as dear.
const pace = 8
