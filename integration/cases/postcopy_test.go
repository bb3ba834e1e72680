package cases

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// servePostcopy is serve with postcopy; it skips where that does not work.
func servePostcopy(t *testing.T, flags ...string) *vhostd {
	t.Helper()
	d := serve(t, "echo", append([]string{"--postcopy", "on"}, flags...)...)
	c := d.dial()
	offered, err := c.GetProtocolFeatures()
	must(t, err)
	must(t, c.Close())
	if offered&vhostuser.ProtoPagefault == 0 {
		testmain.Skip(t, "vhostd finds that postcopy does not work here:\n%s", d.Output())
	}
	d.disconnected()
	return d
}

// destination is the front-end to which a guest migrates whose memory is elsewhere.
type destination struct {
	*frontend.Conn
	origin *frontend.Origin
}

// arrive connects a destination of the guest whose memory is mem, up to where its rings can be set up. Only vhostd may touch the memory
// until all of it was delivered.
func (d *vhostd) arrive(mem *frontend.Memory, features virtio.Features, edit func(*frontend.Origin)) destination {
	d.t.Helper()
	origin, err := mem.Leave()
	must(d.t, err)
	d.t.Cleanup(func() { must(d.t, origin.Close()) })
	edit(origin)
	c := d.dial()
	must(d.t, c.SetOwner())
	must(d.t, c.SetProtocolFeatures(vhostuser.ProtoMQ|vhostuser.ProtoReplyAck|vhostuser.ProtoPagefault))
	fd, err := c.PostcopyAdvise()
	must(d.t, err)
	if fd < 0 {
		d.t.Fatalf("POSTCOPY_ADVISE brings no descriptor:\n%s", d.Output())
	}
	must(d.t, c.PostcopyListen())
	must(d.t, c.SetFeatures(features|virtio.FVhostUserProtocolFeatures))
	specs, fds := mem.Table()
	bases, err := c.SetMemTableListening(specs, fds)
	must(d.t, err)
	origin.Serve(fd, bases)
	must(d.t, c.PostcopyAck(vhostuser.ReqSetMemTable, 0))
	return destination{c, origin}
}

// usedAt reads the used index of a split ring from the file: a look through the mapping would make the page.
func usedAt(t *testing.T, mem *frontend.Memory, q *frontend.Queue) uint16 {
	t.Helper()
	var b [2]byte
	r := mem.Regions[0]
	_, err := unix.Pread(r.FD, b[:], int64(q.GuestAddr().Used-r.GPA+2))
	must(t, err)
	return binary.LittleEndian.Uint16(b[:])
}

// loaded is a pair with frames to send and as many buffers, of which the device knows nothing yet.
func loaded(t *testing.T, mem *frontend.Memory, features virtio.Features, layout frontend.Layout, frames int) (p *frontend.Pair, sent [][]byte) {
	t.Helper()
	p = detached(t, mem, 0, features)
	_, err := p.PostRx(frames)
	must(t, err)
	for i := range frames {
		frame := frameOf(60+7*i%1400, byte(i))
		must(t, p.Stage(virtio.NetHdr{}, frame, layout))
		sent = append(sent, frame)
	}
	must(t, p.TX.Flush())
	return p, sent
}

// TestMIG_PostcopyTraffic migrates a guest with full rings: frames leave it and come back while its memory arrives page by page, in any
// order. Then all has arrived, and frames go on.
func TestMIG_PostcopyTraffic(t *testing.T) {
	for name, layout := range map[string]frontend.Layout{"direct": frontend.Direct, "chained": frontend.Chained, "indirect": frontend.Indirect} {
		for _, sandbox := range []string{"on", "off"} {
			t.Run(name+", sandbox "+sandbox, func(t *testing.T) {
				d := servePostcopy(t, "--sandbox", sandbox)
				base := d.use()
				mem := memory(t)
				frames := 200
				if layout == frontend.Chained {
					frames = 60 // of up to four descriptors
				}
				p, sent := loaded(t, mem, plain, layout, frames)
				c := d.arrive(mem, plain, func(o *frontend.Origin) { o.Delay = 3 * time.Millisecond })
				steps(t, rings(c.Conn, p), on(c.Conn, 0, 1))
				begin := time.Now()
				eventually(t, "all frames have come back", func() bool { return usedAt(t, mem, p.RX) == uint16(frames) && usedAt(t, mem, p.TX) == uint16(frames) })
				t.Logf("%d frames in %v, %d pages were missed", frames, time.Since(begin).Round(time.Millisecond), c.origin.Faults.Load())
				if c.origin.Faults.Load() < 20 {
					t.Error("hardly a page was missed: what was tested?")
				}
				must(t, c.origin.Deliver())
				must(t, c.PostcopyEnd())
				for i, frame := range sent {
					_, got, ok, err := p.TryRecv()
					must(t, err)
					if !ok || !bytes.Equal(got, swapped(frame)) {
						t.Fatalf("frame %d: there %v, %d bytes", i, ok, len(got))
					}
				}
				echoed(t, p, 300)
				must(t, c.Close())
				d.disconnected()
				d.flat(base)
				d.noHelpers()
				d.serves()
			})
		}
	}
}

// helpers counts the processes that populate memory.
func (d *vhostd) helpers() (n int) {
	d.t.Helper()
	entries, err := os.ReadDir("/proc")
	must(d.t, err)
	for _, e := range entries {
		line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err != nil || string(line) != "vhostd-postcopy\x00" {
			continue
		}
		exe, err := os.Readlink("/proc/" + e.Name() + "/exe")
		if err == nil && strings.HasPrefix(exe, d.program) {
			n++
		}
	}
	return n
}

func (d *vhostd) noHelpers() {
	d.t.Helper()
	eventually(d.t, "no helper is left", func() bool { return d.helpers() == 0 })
}

// TestC84_PostcopyStalled: pages that never come hold up their own ring of their own guest. The ring and the connection can be
// ended, another guest is served all the while, and nobody makes the pages.
func TestC84_PostcopyStalled(t *testing.T) {
	d := servePostcopy(t)
	base := d.use()
	for _, end := range []string{"the front-end stops the rings and leaves", "the front-end leaves", "the program stops"} {
		t.Run(end, func(t *testing.T) {
			mem := memory(t)
			p, _ := loaded(t, mem, plain, frontend.Direct, 100)
			c := d.arrive(mem, plain, func(o *frontend.Origin) {
				addr := p.TX.GuestAddr()
				o.Stalled = func(gpa uint64) bool { // the rings come, buffers do not
					in := func(q *frontend.Queue) bool {
						a := q.GuestAddr()
						return gpa >= a.Desc&^4095 && gpa <= a.Used+8*256
					}
					return !in(p.TX) && !in(p.RX) && gpa > addr.Used+8192
				}
			})
			steps(t, rings(c.Conn, p), on(c.Conn, 0, 1))
			eventually(t, "the device misses pages", func() bool { return c.origin.Faults.Load() > 3 })
			time.Sleep(quiet)
			if n := usedAt(t, mem, p.TX); n != 0 {
				t.Errorf("%d frames were sent", n)
			}
			d.stats() // answers
			for i := range 2 {
				if end != "the front-end stops the rings and leaves" {
					break
				}
				got, err := c.GetVringBase(i)
				must(t, err)
				if got != 0 {
					t.Errorf("ring %d: base %d", i, got)
				}
			}
			begin := time.Now()
			if end == "the program stops" {
				d.stop()
			} else {
				must(t, c.Close())
				d.disconnected()
			}
			if took := time.Since(begin); took > 3*time.Second {
				t.Errorf("the end took %v", took)
			}
			d.noHelpers()
			if end != "the program stops" {
				d.flat(base)
				d.serves()
			}
		})
	}
}

// TestC84_PostcopyTakenBack: a front-end removes pages that have arrived, or cuts the file. The first finds zeros in its rings, the second
// loses its connection; nobody else notices.
func TestC84_PostcopyTakenBack(t *testing.T) {
	d := servePostcopy(t)
	base := d.use()
	for name, takeBack := range map[string]func(fd int, size int64) error{
		"punched": func(fd int, size int64) error {
			return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size)
		},
		"cut": func(fd int, _ int64) error { return unix.Ftruncate(fd, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			mem := memory(t, 8<<20)
			p, _ := loaded(t, mem, plain, frontend.Direct, 200)
			c := d.arrive(mem, plain, func(o *frontend.Origin) { o.Delay = 2 * time.Millisecond })
			steps(t, rings(c.Conn, p), on(c.Conn, 0, 1))
			eventually(t, "frames flow", func() bool { return usedAt(t, mem, p.TX) > 20 })
			must(t, takeBack(mem.Regions[0].FD, 8<<20))
			for range 20 {
				must(t, p.TX.Kick())
				must(t, p.RX.Kick())
				d.stats() // answers
				time.Sleep(quiet / 20)
			}
			must(t, c.Close())
			d.disconnected()
			d.noHelpers()
			d.flat(base)
			d.serves()
		})
	}
}

// TestC84_PostcopyKilled ends front-ends in every state of a migration. Nothing of them is left.
func TestC84_PostcopyKilled(t *testing.T) {
	d := servePostcopy(t)
	mem := memory(t, 8<<20)
	base := d.use()
	for i := range rounds(10, 200) {
		for state, reach := range []func(*frontend.Conn) error{
			func(c *frontend.Conn) error { return c.Send(vhostuser.ReqPostcopyAdvise, vhostuser.FlagVersion, nil) },
			func(c *frontend.Conn) error { return advised(c) },
			func(c *frontend.Conn) error { return first(func() error { return advised(c) }, c.PostcopyListen) },
			func(c *frontend.Conn) error {
				specs, fds := mem.Table()
				return first(func() error { return advised(c) }, c.PostcopyListen, func() error {
					_, err := c.SetMemTableListening(specs, fds)
					return err
				})
			},
			func(c *frontend.Conn) error {
				specs, fds := mem.Table()
				return first(func() error { return advised(c) }, c.PostcopyListen, func() error {
					_, err := c.SetMemTableListening(specs, fds)
					return err
				}, func() error { return c.PostcopyAck(vhostuser.ReqSetMemTable, 0) })
			},
		} {
			c := d.dial()
			must(t, c.SetProtocolFeatures(vhostuser.ProtoReplyAck|vhostuser.ProtoPagefault))
			if err := reach(c); err != nil {
				t.Fatalf("round %d, state %d: %v", i, state, err)
			}
			must(t, c.Close())
			d.disconnected()
		}
	}
	d.noHelpers()
	d.flat(base)
	d.serves()
}

func advised(c *frontend.Conn) error {
	fd, err := c.PostcopyAdvise()
	if err == nil && fd < 0 {
		err = fmt.Errorf("no userfaultfd")
	}
	if err != nil {
		return err
	}
	return unix.Close(fd)
}
