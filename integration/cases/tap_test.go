package cases

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// transmit sends n frames and waits until all are used.
func (g *guest) transmit(n int) {
	g.t.Helper()
	for range n {
		must(g.t, g.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
		must(g.t, g.DrainTx(patience))
	}
}

func TestTAP01_FailedWrites(t *testing.T) {
	h := newHost(t)
	g := h.guest(offloading(canReceive))
	c := h.cable(tapName)
	c.passes(g)

	h.link(tapName, netlink.LinkSetDown)
	g.transmit(20)
	g.dropped(1, "port_tap_down", 20)
	eventually(t, "the status tells that the tap is down", func() bool { return !g.d.status().NetworkUp })
	h.link(tapName, netlink.LinkSetUp)
	c.passes(g)
	if s := g.d.status(); !s.NetworkUp {
		t.Errorf("the tap is up again, the status says: %s", s.NetworkDetail)
	}

	// A header that is good enough for vhostd but not for the kernel: the checksum of an IP header's middle, odd and far away.
	before := g.d.ring(1)
	must(t, g.SendTx(virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 57, CsumOffset: 1}, frameOf(60, 1), frontend.Direct))
	must(t, g.DrainTx(patience))
	eventually(t, "the frame is sent or counted", func() bool {
		r := g.d.ring(1)
		return r.Packets > before.Packets || r.Drops["port_bad_header"] > before.Drops["port_bad_header"]
	})
	c.passes(g)

	// A queue of one frame, flooded from both sides.
	h.link(tapName, func(l netlink.Link) error { return netlink.LinkSetTxQLen(l, 1) })
	for i := range 2000 {
		_ = c.try(virtio.NetHdr{}, frameOf(60, byte(i))) // refused when the queue is full
		if i%4 == 0 {
			g.transmit(1)
		}
		_, _, ok, err := g.TryRecv()
		must(t, err)
		if ok {
			_, err := g.PostRx(1)
			must(t, err)
		}
	}
	h.link(tapName, func(l netlink.Link) error { return netlink.LinkSetTxQLen(l, 1000) })
	c.passes(g)
}

func TestTAP01_DeletedAndMoved(t *testing.T) {
	for name, change := range map[string]func(*host){
		"deleted": func(h *host) { h.link(tapName, netlink.LinkDel) },
		"moved": func(h *host) {
			other := newHost(h.t)
			h.link(tapName, func(l netlink.Link) error { return netlink.LinkSetNsFd(l, other.handle()) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			g := h.guest(ordinary())
			h.cable(tapName).passes(g)
			change(h)
			g.transmit(200)
			eventually(t, "frames are counted as dropped", func() bool { return g.d.drops(1) >= 200 })
			eventually(t, "the status tells", func() bool { return !g.d.status().NetworkUp && g.d.status().NetworkDetail != "" })
			t.Log(g.d.status().NetworkDetail)
			if n := strings.Count(g.d.Output(), "level=WARN"); n > 2 {
				t.Errorf("%d warnings for one event:\n%s", n, g.d.Output())
			}
			_, _, err := g.c.Stop(0) // the control channel is unaffected
			must(t, err)
		})
	}
}

func TestTAP03_LongFrames(t *testing.T) {
	for name, change := range map[string]func(*frontend.Options){
		"mergeable":                func(*frontend.Options) {},
		"mergeable, no GUEST_TSO":  func(o *frontend.Options) { o.Features &^= virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 },
		"small buffers":            func(o *frontend.Options) { o.Features &^= virtio.FNetMrgRxBuf },
		"large buffers":            func(o *frontend.Options) { o.Features &^= virtio.FNetMrgRxBuf; o.RxBuf = 65562 },
		"mergeable, tiny buffers":  func(o *frontend.Options) { o.RxBuf = 600 },
		"mergeable, no GUEST_CSUM": func(o *frontend.Options) { o.Features &^= canReceive },
	} {
		t.Run(name, func(t *testing.T) {
			opts := offloading(canReceive)
			change(&opts)
			h := newHost(t)
			g := h.guest(opts, "--mtu", "9000")
			h.link(tapName, func(l netlink.Link) error {
				if l.Attrs().MTU != 9000 {
					return fmt.Errorf("MTU %d, want 9000", l.Attrs().MTU)
				}
				return nil
			})
			fits := opts.Features.Has(virtio.FNetMrgRxBuf) || opts.RxBuf > 60000
			c := h.cable(tapName)
			for i, tags := range []int{0, 1} {
				s := segment{udp: true, tags: tags, payload: text(9000 - 28)}
				c.send(virtio.NetHdr{}, s.finished())
				if !fits {
					g.dropped(0, "rx_buffers_too_small", i+1)
				} else if _, got := g.recv(); !bytes.Equal(got, s.finished()) {
					t.Errorf("%v: received %d bytes of %d, or wrong ones", s, len(got), len(s.finished()))
				}
			}
			s := segment{payload: text(60000)}
			frame, _ := s.frame()
			c.send(s.marks(mss), frame)
			switch {
			case !opts.Features.Has(virtio.FNetGuestTSO4):
				r := reassembly{of: s}
				for !r.complete() {
					hdr, got := g.recv()
					if hdr.Flags&virtio.HdrFNeedsCsum != 0 {
						got = finish(got, int(hdr.CsumStart), hdr.CsumOffset)
					}
					must(t, r.add(got))
				}
			case !fits:
				g.dropped(0, "rx_buffers_too_small", 3)
			default:
				if hdr, got := g.recv(); !bytes.Equal(finish(got, int(hdr.CsumStart), hdr.CsumOffset), s.finished()) {
					t.Errorf("%v: received %d bytes of %d, or wrong ones", s, len(got), len(frame))
				}
			}
			c.passes(g)
		})
	}
}

func TestTAP05_TapsAfterACrash(t *testing.T) {
	h := newHost(t)
	h.bridge()
	h.addTap("kept0")
	h.join("kept0")
	daemons := map[string]*vhostd{}
	for _, network := range []string{"tap,name=gone0", "tap,name=made0,persist=on", "tap,name=kept0"} {
		daemons[network] = h.serve(network)
	}
	address, err := netlink.ParseAddr("192.0.2.1/24")
	must(t, err)
	h.link("made0", func(l netlink.Link) error { return netlink.AddrAdd(l, address) })
	index := map[string]int{}
	for _, name := range []string{"made0", "kept0"} {
		h.link(name, func(l netlink.Link) error { index[name] = l.Attrs().Index; return nil })
	}
	for range rounds(3, 10) {
		for _, d := range daemons {
			d.kill()
		}
		if h.ns.HasLink("gone0") {
			t.Error("gone0 outlived the program")
		}
		for _, d := range daemons {
			d.start()
		}
		for name, want := range index {
			h.link(name, func(l netlink.Link) error {
				if l.Attrs().Index != want {
					return fmt.Errorf("%s was made again", name)
				}
				return nil
			})
		}
	}
	h.link("kept0", func(l netlink.Link) error {
		if l.Attrs().MasterIndex == 0 {
			return errors.New("kept0 left its bridge")
		}
		return nil
	})
	h.link("made0", func(l netlink.Link) error {
		addresses, err := netlink.AddrList(l, unix.AF_INET)
		if err == nil && len(addresses) != 1 {
			err = fmt.Errorf("made0 has addresses %v, had %v", addresses, address)
		}
		return err
	})
	testBusyTap(t, h, "gone0")
}

// testBusyTap starts another program on a tap that is in use.
func testBusyTap(t *testing.T, h *host, name string) {
	t.Helper()
	d := prepare(t, "tap,name="+name, "--queue-pairs", "1")
	p, err := rig.Start(h.ns, program, d.args...)
	must(t, err)
	if err := p.Wait(patience); err == nil || p.ExitCode() != 1 {
		t.Errorf("a tap that is in use: exit status %d, want 1", p.ExitCode())
	}
	if out := p.Output(); !strings.Contains(out, name) || !strings.Contains(out, "another process uses the tap") {
		t.Errorf("a tap that is in use: output %q", out)
	}
}

// TestNTF09_ReceiveAfterABurstFromATap: the frames wait in the kernel.
func TestNTF09_ReceiveAfterABurstFromATap(t *testing.T) {
	for name, opts := range suppression() {
		t.Run(name, func(t *testing.T) {
			opts.RingSize = 1024
			h := newHost(t)
			g := h.serve("tap,name="+tapName).guest(memory(t), opts)
			_, err := g.PostRx(buffers)
			must(t, err)
			c := h.cable(tapName)
			for i := range burst {
				c.send(virtio.NetHdr{}, frameNo(i))
			}
			testRefill(t, g, func(i int, frame []byte) bool { return bytes.Equal(frame, frameNo(i)) })
		})
	}
}

// TestPERF01_NoProcessorTimeWithAnIdleGuest floods a tap whose guest has no buffers, then one that is down.
func TestPERF01_NoProcessorTimeWithAnIdleGuest(t *testing.T) {
	h := newHost(t)
	g := h.serve("tap,name="+tapName).guest(memory(t), ordinary())
	c := h.cable(tapName)
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for tick := time.NewTicker(time.Millisecond); ; <-tick.C {
			select {
			case <-quit:
				return
			default:
			}
			for range 10 {
				_ = c.try(virtio.NetHdr{}, frameOf(60, 1)) // the kernel drops what does not fit
			}
		}
	}()
	g.d.idle(0.1, time.Duration(rounds(1, 10))*time.Second)
	_, err := g.PostRx(200)
	must(t, err)
	begin := time.Now()
	if _, _, err := g.RecvFrame(patience); err != nil {
		t.Fatal(err)
	}
	soon(t, "the first frame came", begin)
	h.link(tapName, netlink.LinkSetDown)
	g.d.idle(0.1, time.Duration(rounds(1, 10))*time.Second)
	close(quit)
	<-done
}

func TestMTU01_TapFollows(t *testing.T) {
	h := newHost(t)
	g := h.guest(ordinary())
	for _, mtu := range []uint64{68, 1500, 9000} {
		must(t, g.c.NetSetMTU(mtu))
		must(t, g.c.Sync())
		h.link(tapName, func(l netlink.Link) error {
			if l.Attrs().MTU != int(mtu) {
				return fmt.Errorf("MTU %d, want %d", l.Attrs().MTU, mtu)
			}
			return nil
		})
	}
	h.cable(tapName).passes(g)
}

func TestMTU05_RuntsToATap(t *testing.T) {
	for name, opts := range map[string]frontend.Options{"plain": ordinary(), "offloads": offloading(0)} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.bridge()
			g := h.guest(opts)
			h.join(tapName)
			testRunts(t, g, false)
			h.cable(tapName).passes(g)
		})
	}
}
