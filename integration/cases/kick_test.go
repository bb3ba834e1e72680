package cases

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// TestNTF05_FirstKick: whatever was kicked, or only posted, before the ring was ready is served.
func TestNTF05_FirstKick(t *testing.T) {
	for name, begin := range map[string]func(t *testing.T, c *frontend.Conn, p *frontend.Pair, post func()){
		"1 kicked before it is enabled": func(t *testing.T, c *frontend.Conn, p *frontend.Pair, post func()) {
			must(t, setRing(c, p.RX, 0))
			post()
			must(t, p.RX.Kick())
			time.Sleep(50 * time.Millisecond)
			must(t, enable(c, true, 0))
		},
		"2 kicked between disabling and enabling": func(t *testing.T, c *frontend.Conn, p *frontend.Pair, post func()) {
			must(t, setRing(c, p.RX, 0))
			must(t, enable(c, true, 0))
			must(t, enable(c, false, 0))
			post()
			must(t, p.RX.Kick())
			time.Sleep(50 * time.Millisecond)
			must(t, enable(c, true, 0))
		},
		"3 the descriptor has counted already": func(t *testing.T, c *frontend.Conn, p *frontend.Pair, post func()) {
			post()
			must(t, p.RX.Kick())
			must(t, enable(c, true, 0))
			must(t, setRing(c, p.RX, 0))
		},
		"4 posted and never kicked": func(t *testing.T, c *frontend.Conn, p *frontend.Pair, post func()) {
			post()
			signals(t, p.RX.KickFD)
			must(t, enable(c, true, 0))
			must(t, setRing(c, p.RX, 0))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, "source,rate=1000")
			mem := memory(t)
			c := d.session(mem, plain)
			p := detached(t, mem, 0, plain)
			begin(t, c, p, func() {
				_, err := p.PostRx(8)
				must(t, err)
			})
			since := time.Now()
			for range 8 {
				_, _, err := p.RecvFrame(patience)
				must(t, err)
			}
			soon(t, "the posted buffers were filled", since)
		})
	}
}

// TestNTF05_FirstFrameToSend is the same for frames to send, which are there before the ring starts.
func TestNTF05_FirstFrameToSend(t *testing.T) {
	for name, begin := range map[string]func(t *testing.T, c *frontend.Conn, p *frontend.Pair){
		"3 the descriptor has counted already": func(t *testing.T, c *frontend.Conn, p *frontend.Pair) {
			must(t, p.TX.Kick())
			must(t, setRing(c, p.TX, 0))
		},
		"4 posted and never kicked": func(t *testing.T, c *frontend.Conn, p *frontend.Pair) {
			signals(t, p.TX.KickFD)
			must(t, setRing(c, p.TX, 0))
		},
		"another kick descriptor for the running ring": func(t *testing.T, c *frontend.Conn, p *frontend.Pair) {
			must(t, setRing(c, p.TX, 0))
			must(t, p.DrainTx(patience))
			fresh, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
			must(t, err)
			must(t, c.SetVringKick(1, fresh))
			must(t, unix.Close(p.TX.KickFD))
			p.TX.KickFD = fresh
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, "null")
			mem := memory(t)
			c := d.session(mem, plain)
			p := detached(t, mem, 0, plain)
			must(t, enable(c, true, 0, 1))
			for range 20 {
				must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			}
			since := time.Now()
			begin(t, c, p)
			must(t, p.DrainTx(patience))
			must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			must(t, p.DrainTx(patience))
			soon(t, "the frames were sent", since)
			eventually(t, "the network got all frames", func() bool { return d.ring(1).Packets == 21 })
		})
	}
}

// TestNTF05_NewCallIsSignaled: what was signaled on the call descriptor before may have been lost, so a new one is signaled once.
func TestNTF05_NewCallIsSignaled(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	flows(t, p)
	drainEvents(t, p)
	for _, q := range []*frontend.Queue{p.RX, p.TX} {
		must(t, c.SetVringCall(q.Index, q.CallFD))
		if err := q.WaitCall(patience); err != nil {
			t.Errorf("ring %d: a new call descriptor was not signaled: %v", q.Index, err)
		}
	}
}

// TestNTF10_DescriptorsOfAnyKind: blocking and non-blocking eventfds and semaphores all work as kick descriptors, and the back-end
// changes nothing about them.
func TestNTF10_DescriptorsOfAnyKind(t *testing.T) {
	d := serve(t, "echo")
	d.serves()
	base := d.use()
	for name, kind := range map[string]int{
		"blocking eventfd":       0,
		"non-blocking eventfd":   unix.EFD_NONBLOCK,
		"blocking semaphore":     unix.EFD_SEMAPHORE,
		"non-blocking semaphore": unix.EFD_SEMAPHORE | unix.EFD_NONBLOCK,
	} {
		t.Run(name, func(t *testing.T) {
			mem := memory(t)
			c := d.session(mem, plain)
			p := detached(t, mem, 0, plain)
			for _, q := range []*frontend.Queue{p.RX, p.TX} {
				fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|kind)
				must(t, err)
				must(t, unix.Close(q.KickFD))
				q.KickFD = fd
				flags := statusFlags(t, fd)
				steps(t, func() error { return c.SetVringNum(q.Index, 256) }, func() error { return c.SetVringAddr(q.Addr()) },
					func() error { return c.SetVringCall(q.Index, q.CallFD) }, func() error { return c.SetVringKick(q.Index, fd) },
					on(c, q.Index))
				for range 50 { // more than are served one by one
					must(t, q.Kick())
				}
				defer func() {
					if now := statusFlags(t, fd); now != flags {
						t.Errorf("ring %d: flags of the kick descriptor are %#o, were %#o", q.Index, now, flags)
					}
				}()
			}
			for range 20 {
				flows(t, p)
			}
			d.idle(0.2, 200*time.Millisecond)
			must(t, c.Close())
			d.disconnected()
			d.flat(base)
		})
	}
	d.serves()
}

func statusFlags(t *testing.T, fd int) int {
	t.Helper()
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	must(t, err)
	return flags
}

// TestNTF10_UnusableKick: descriptors that cannot be waited for are refused, and so are pipes, whose lock the peer can hold.
func TestNTF10_UnusableKick(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	flows(t, p)
	base := d.use()
	var pipe [2]int
	must(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	mustRefuse(t, "a pipe as kick descriptor", c.SetVringKick(1, pipe[0]))
	must(t, unix.Close(pipe[0]))
	must(t, unix.Close(pipe[1]))
	_, fds := mem.Table()
	for range 20 {
		mustRefuse(t, "a memory file as kick descriptor", c.SetVringKick(1, fds[0]))
	}
	flows(t, p)
	d.flat(base)
}

// TestNTF10_FullCall: a call descriptor whose counter is full has been signaled already; it never holds the worker.
func TestNTF10_FullCall(t *testing.T) {
	for name, flags := range map[string]int{"blocking": 0, "non-blocking": unix.EFD_NONBLOCK} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, "echo", "--queue-pairs", "2")
			d.serves()
			base := d.use()
			mem := memory(t)
			c := d.session(mem, plain)
			p, other := detached(t, mem, 0, plain), detached(t, mem, 1, plain)
			steps(t, rings(c, p), rings(c, other), on(c, 0, 1, 2, 3))
			flows(t, p)
			full, err := unix.Eventfd(0, unix.EFD_CLOEXEC|flags)
			must(t, err)
			defer unix.Close(full)
			_, err = unix.Write(full, word(^uint64(1)))
			must(t, err)
			must(t, c.SetVringCall(0, full))
			must(t, c.SetVringCall(1, full))
			for range 20 {
				_, err := p.PostRx(4)
				must(t, err)
				must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
				eventually(t, "a frame comes back", func() bool {
					_, _, ok, err := p.TryRecv()
					must(t, err)
					return ok
				})
				flows(t, other)
			}
			begin := time.Now()
			must(t, c.Sync())
			soon(t, "control was answered", begin)
			must(t, c.SetVringCall(0, p.RX.CallFD))
			must(t, c.SetVringCall(1, p.TX.CallFD))
			flows(t, p)
			must(t, c.Close())
			d.disconnected()
			d.flat(base)
		})
	}
}
