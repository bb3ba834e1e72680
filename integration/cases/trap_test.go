package cases

import (
	"testing"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// What real front-ends do that surprised other back-ends, as far as no case has it.

// TestTrap02_StatusZeroKeepsPositions: QEMU before 8.1 sends status 0 ahead of GET_VRING_BASE.
func TestTrap02_StatusZeroKeepsPositions(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, func() error { return c.SetStatus(8) }, rings(c, p), on(c, 0, 1), func() error { return c.SetStatus(0xf) })
	echoed(t, p, 40)
	must(t, c.SetStatus(0))
	if s, err := c.GetStatus(); err != nil || s != 0 {
		t.Errorf("status %d, %v, want 0", s, err)
	}
	stopped(t, c, p, 40)
	steps(t, func() error { return c.SetStatus(0xf) }, func() error { return setRing(c, p.RX, 40) }, func() error { return setRing(c, p.TX, 40) })
	echoed(t, p, 10)
}

// TestTrap15_RestartWithoutGetVringBase: libkrun resets a device with SET_VRING_ENABLE 0 alone. The next kick descriptor, base 0
// and zeroed memory begin the next life.
func TestTrap15_RestartWithoutGetVringBase(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	for range 3 {
		steps(t, rings(c, p), on(c, 0, 1))
		echoed(t, p, 30)
		must(t, enable(c, false, 0, 1))
		zero(p)
	}
}

// TestTrap17_OfferIsStable: QEMU keeps its features over reconnects and fails the link if the new offer is smaller.
func TestTrap17_OfferIsStable(t *testing.T) {
	d := serve(t, "echo")
	offer := func() (f virtio.Features, p vhostuser.ProtocolFeatures, n int) {
		c := d.dial()
		f, err := c.GetFeatures()
		must(t, err)
		p, err = c.GetProtocolFeatures()
		must(t, err)
		must(t, c.SetProtocolFeatures(p))
		n, err = c.GetQueueNum()
		must(t, err)
		again, err := c.GetFeatures()
		must(t, err)
		if again != f {
			t.Errorf("offers %v and then %v", f, again)
		}
		must(t, c.Close())
		d.disconnected()
		return f, p, n
	}
	f, p, n := offer()
	mem := memory(t)
	c := d.connect(mem, frontend.Options{Features: plain &^ virtio.FNetMrgRxBuf})
	flows(t, pair(t, c, 0))
	must(t, c.Close())
	d.disconnected()
	d.kill()
	d.start()
	if f2, p2, n2 := offer(); f2 != f || p2 != p || n2 != n {
		t.Errorf("offers %v, %v, %d rings after a restart; %v, %v, %d before", f2, p2, n2, f, p, n)
	}
}
