package user

import (
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// contain, deferred, takes a panic of the function and ends the network for it. It stands in front of everything that runs on a goroutine
// that the network has started, and of everything that the stack calls: unwound through the stack, a panic would leave its locks behind.
// What the stack runs on its own processors alone cannot be contained, see docs/threat-model.md.
func (p *Port) contain() {
	if cause := recover(); cause != nil {
		p.fail(cause)
	}
}

// spawn runs f on a goroutine of its own.
func (p *Port) spawn(f func()) {
	go func() {
		defer p.contain()
		f()
	}()
}

// after is [time.AfterFunc].
func (p *Port) after(d time.Duration, f func()) *time.Timer {
	return time.AfterFunc(d, func() {
		defer p.contain()
		f()
	})
}

// clock is that of the stack. All of the stack's timers are made by it: retransmission, keep-alive, reassembly.
type clock struct {
	tcpip.Clock
	port *Port
}

// AfterFunc implements [tcpip.Clock].
func (c clock) AfterFunc(d time.Duration, f func()) tcpip.Timer {
	return c.Clock.AfterFunc(d, func() {
		defer c.port.contain()
		f()
	})
}
