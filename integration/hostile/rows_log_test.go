package hostile

import (
	"bytes"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// dirtyLog is one in a file of its own.
type dirtyLog struct {
	a            *attack
	fd           int
	size, offset uint64
}

func (a *attack) log(size, offset uint64) dirtyLog {
	a.t.Helper()
	return dirtyLog{a, a.memfd(int64(size + offset)), size, offset}
}

// wholeLog has a bit for every page of the first region.
const wholeLog = regionEnd / guestmem.LogPage / 8

func (l dirtyLog) file() []byte {
	l.a.t.Helper()
	b := make([]byte, l.offset+l.size+8)
	_, err := unix.Pread(l.fd, b, 0)
	must(l.a.t, err)
	return b
}

// marked reports whether the page of a guest address is dirty.
func (l dirtyLog) marked(gpa uint64) bool {
	page := gpa / guestmem.LogPage
	return l.file()[l.offset+page/8]>>(page%8)&1 != 0
}

// marks counts the dirty pages.
func (l dirtyLog) marks() (n int) {
	for _, b := range l.file() {
		for ; b != 0; b &= b - 1 {
			n++
		}
	}
	return n
}

// logInto switches logging to l for the rings of p.
func (a *attack) logInto(c *frontend.Client, p *frontend.Pair, l dirtyLog) {
	a.t.Helper()
	must(a.t, c.SetLogBase(l.size, l.offset, l.fd))
	must(a.t, c.SetFeatures(c.Features|virtio.FVhostLogAll))
	for _, q := range []*frontend.Queue{p.RX, p.TX} {
		addr := q.Addr()
		addr.Flags = 1
		must(a.t, c.SetVringAddr(addr))
	}
}

// marksUsed demands that traffic marks the transmitq's used ring.
func (a *attack) marksUsed(p *frontend.Pair, l dirtyLog) {
	a.t.Helper()
	a.flows(p)
	if at, _ := p.TX.UsedRing(); !l.marked(at) {
		a.t.Errorf("log at %#x: the used ring is not marked", l.offset)
	}
}

// badLogs are refused.
func (a *attack) badLogs(c *frontend.Client) {
	a.t.Helper()
	l := a.log(64, 0xfc0) // a page
	for _, s := range [][2]uint64{{^uint64(0), 1}, {^uint64(0) - 4095, 4096}, {0x1000, 1}, {0x1001, 0}, {1 << 63, 1 << 63}, {1, ^uint64(0)}, {1 << 40, 0}} {
		a.refused(fmt.Sprintf("log of %#x bytes at %#x", s[0], s[1]), c.SetLogBase(s[0], s[1], l.fd))
	}
}

var logRows = []row{
	{"A1", "log_size_and_offset_wrap", func(a *attack) {
		c, p := a.running(frontend.Options{})
		good := a.log(wholeLog, 0)
		a.logInto(c, p, good)
		a.badLogs(c)
		a.marksUsed(p, good) // the log before stays in use
	}},
	{"A12", "log_that_cannot_be_mapped", func(a *attack) {
		c, p := a.running(frontend.Options{})
		a.refused("size 0", c.SetLogBase(0, 0, a.memfd(4096)))
		a.refused("an eventfd", c.SetLogBase(4096, 0, a.eventfd(0)))
		a.refused("nothing", c.DoAck(vhostuser.ReqSetLogBase, make([]byte, 16)))
		a.refused("logging without a log", c.SetFeatures(c.Features|virtio.FVhostLogAll))
		a.flows(p)
	}},
	{"A17", "one_reply_of_16_bytes", func(a *attack) {
		c, p := a.running(frontend.Options{})
		l := a.log(wholeLog, 0)
		for _, flags := range []uint32{vhostuser.FlagVersion, vhostuser.FlagVersion | vhostuser.FlagNeedReply} {
			want := vhostuser.DirtyLog{Size: l.size}.Append(nil)
			must(a.t, c.Send(vhostuser.ReqSetLogBase, flags, want, l.fd))
			must(a.t, c.Send(vhostuser.ReqGetFeatures, vhostuser.FlagVersion, nil))
			r, err := c.Recv(patience)
			if err != nil || r.Request != vhostuser.ReqSetLogBase || r.Flags != 5 || !bytes.Equal(r.Payload, want) {
				a.t.Errorf("reply %+v of %d bytes, %v", r.Header, len(r.Payload), err)
			}
			if r, err := c.Recv(patience); err != nil || r.Request != vhostuser.ReqGetFeatures {
				a.t.Errorf("a second reply: %+v, %v", r.Header, err)
			}
		}
		a.flows(p)
	}},
	{"A25", "log_at_any_offset", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for _, offset := range []uint64{0, 0x1000, 0x800, 1, 0x1003} {
			l := a.log(wholeLog, offset)
			a.logInto(c, p, l)
			a.marksUsed(p, l)
			if !bytes.Equal(l.file()[:offset], make([]byte, offset)) {
				a.t.Errorf("offset %#x: bytes in front of the log were written", offset)
			}
		}
	}},
	{"B20", "forged_descriptors_while_logging", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f, RingSize: 256})
			l := a.log(wholeLog, 0)
			a.logInto(c, p, l)
			var nothing []desc
			for i := range uint16(255) { // as many as an array of pages might have
				nothing = append(nothing, desc{bufAt + uint64(i)*4096, 0, write | next, i + 1})
			}
			nothing = append(nothing, desc{bufAt, 2048, write, 0})
			offered := a.offer(p.RX, nothing...)
			must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			offered.returned(72)
			must(a.t, p.DrainTx(patience))
			a.fault(c, p, "address", nil, desc{^uint64(0) - 4095, 72, 0, 0})
			if f.Has(virtio.FRingPacked) {
				a.flows(p)
			} else {
				a.marksUsed(p, l)
			}
			if !l.marked(bufAt) || l.marked(bufAt+4096) {
				a.t.Error("not what was written is marked")
			}
			if n := l.marks(); n > 40 {
				a.t.Errorf("%d pages are marked", n)
			}
		})
	}},
	{"C72", "log_too_small", func(a *attack) {
		c, p := a.running(frontend.Options{})
		l := a.log(1, 0) // 8 pages, in a file of more
		must(a.t, unix.Ftruncate(l.fd, 4096))
		a.logInto(c, p, l)
		for range 20 {
			a.flows(p)
		}
		if !bytes.Equal(l.file()[1:], make([]byte, len(l.file())-1)) {
			a.t.Error("bytes behind the log were written")
		}
	}},
	{"C73", "log_file_cut", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			l := a.log(wholeLog, 0)
			a.logInto(c, p, l)
			must(a.t, unix.Ftruncate(l.fd, 0))
			_, err := p.PostRx(4)
			must(a.t, err)
			must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			a.closes("a log that vanished", c.Conn)
		})
	}},
	{"C74", "new_log_for_every_pass_under_load", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			l := a.log(wholeLog, 0)
			a.logInto(c, p, l)
			stop, ended := make(chan struct{}), make(chan error, 1)
			go func() {
				var err error
				for i := 0; err == nil && !closed(stop); i++ {
					err = roundTrip(p, frameOf(60+i%1400, byte(i)))
				}
				ended <- err
			}()
			source, image := c.Mem.Bytes(0, bufAt/10), make([]byte, bufAt/10)
			copy(image, source)
			for i := range 10 {
				fresh := a.log(wholeLog, uint64(i%3)*0x333)
				must(a.t, c.SetLogBase(fresh.size, fresh.offset, fresh.fd))
				l.copyTo(image, source)
				l = fresh
			}
			close(stop)
			must(a.t, <-ended)
			_, _, err := c.Stop(0)
			must(a.t, err)
			l.copyTo(image, source)
			at, n := p.RX.Buffers()
			if !bytes.Equal(source[at:at+n], image[at:at+n]) {
				a.t.Error("the receive buffers at the destination are not those of the source")
			}
			for _, q := range []*frontend.Queue{p.RX, p.TX} {
				if at, n := q.UsedRing(); !bytes.Equal(source[at:at+n], image[at:at+n]) {
					a.t.Errorf("ring %d: the used ring at the destination is not that of the source", q.Index)
				}
			}
		})
	}},
}

// copyTo copies the dirty pages from source to image, as a migration does.
func (l dirtyLog) copyTo(image, source []byte) {
	l.a.t.Helper()
	bits := l.file()[l.offset:]
	for page := range uint64(len(image)) / guestmem.LogPage {
		if bits[page/8]>>(page%8)&1 != 0 {
			at := page * guestmem.LogPage
			copy(image[at:at+guestmem.LogPage], source[at:])
		}
	}
}
