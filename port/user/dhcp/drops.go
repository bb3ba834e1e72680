package dhcp

import "sync/atomic"

// drop is why a message got no answer.
type drop int

const (
	tooLong drop = iota
	malformed
	relayed     // from a relay agent, which this network has none of
	notClient   // not what a client sends
	spoofed     // of another station than the one that sent the frame
	otherServer // the client has chosen another server
	noAddress   // all are in use
	noAnswer    // of a kind that has none: a release, a decline
	drops
)

var dropNames = [drops]string{"too_long", "malformed", "relayed", "not_client", "spoofed", "other_server", "no_address", "no_answer"}

type counters [drops]atomic.Uint64

func (c *counters) visit(f func(reason string, n uint64)) {
	for i := range c {
		f(dropNames[i], c[i].Load())
	}
}
