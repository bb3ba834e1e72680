// Package dns is the name server that guests of the user-mode network find at their gateway: a forwarder that passes questions on to
// the host's resolvers and knows a few names itself.
//
// # Unchanged
//
// A message is passed on as it came, whatever its record types and options: only the identifier is another one, and, if asked for, the
// case of the letters of the question, which is put back in the answer. An answer is parsed when a [Filter] has to judge it or when it
// is too long for the guest's datagram; then it is truncated, and the guest asks again over TCP. There is no cache: the host's
// resolver has one.
//
// # Never silent
//
// A question is answered whatever happens: with SERVFAIL when no resolver answers in time or too much is under way, NOTIMP for what is
// no query, FORMERR for what cannot be read but has an identifier. Only what is no question at all (too short, or an answer) is
// dropped. Resolvers are tried in their order, those that did not answer lately last. One that answers SERVFAIL, REFUSED or
// NOTIMP is not the last word as long as there is another.
//
// # Bounds
//
// Questions under way, connections, sockets to resolvers and the life of each are bounded, and a guest has a share ([MaxPerClient]),
// so that it cannot keep others of the network from being served. A socket to a resolver is shared by up to 16 questions and given
// up after 64 or ten seconds, so that ports change; identifiers are random; an answer counts if it comes from the resolver to the right
// port and repeats identifier and question.
package dns
