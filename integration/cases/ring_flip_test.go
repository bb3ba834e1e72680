package cases

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

func TestRING06_GuestChangesWhatWasChecked(t *testing.T) {
	opts := ordinary()
	opts.Features |= virtio.FNetCSum | virtio.FNetGuestCSum
	g := newGuest(t, "echo", opts)
	f := newFlipper(g)
	stop := f.run()
	for end := time.Now().Add(time.Duration(rounds(5, 60)) * time.Second); time.Now().Before(end); {
		f.round()
	}
	stop()
	f.raw.done()
	if f.good == 0 || f.bad == 0 {
		t.Errorf("%d good and %d malformed frames: both sorts were wanted", f.good, f.bad)
	}
	t.Logf("%d good, %d malformed frames", f.good, f.bad)
	_, err := g.PostRx(4)
	must(t, err)
	flows(t, g.Pair)
}

// flipper offers the same chains again and again while another thread changes them under the program.
type flipper struct {
	g         *guest
	raw       *raw
	frames    [][]byte // by head
	hdrs      []uint64 // guest addresses of the headers
	tables    []uint64
	good, bad int
}

// Heads are used in one of four ways: those whose length, address, header or indirect table changes.
const (
	flipLength = iota
	flipAddress
	flipHeader
	flipTable
	flips
	flipHeads = 64
	flipFrame = 48
)

func newFlipper(g *guest) *flipper {
	f := &flipper{g: g, raw: g.raw(g.TX)}
	for i := range flipHeads {
		frame := frameOf(flipFrame, byte(i))
		frame[14] = byte(i)
		b := g.put(frame)
		f.frames, f.hdrs = append(f.frames, frame), append(f.hdrs, b.Addr)
		f.tables = append(f.tables, g.alloc(32))
		if i%flips == flipHeader {
			virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 34, CsumOffset: 6}.Encode(g.mem.Bytes(b.Addr, virtio.NetHdrLen))
		}
		driver.PokeTable(g.mem.Host(f.tables[i]), 1, b.Addr+virtio.NetHdrLen, flipFrame, 0, 0)
		f.flip(uint16(i), false)
	}
	_, err := g.PostRx(256)
	must(g.t, err)
	return f
}

// flip makes chain i wrong, or right again.
func (f *flipper) flip(i uint16, wrong bool) {
	b := driver.Buf{Addr: f.hdrs[i], Len: virtio.NetHdrLen + flipFrame}
	switch i % flips {
	case flipLength:
		if wrong {
			b.Len = 0xfffff000
		}
	case flipAddress:
		if wrong {
			b.Addr = hole
		}
	case flipHeader:
		start := uint16(34)
		if wrong {
			start = 0xffff
		}
		binary.LittleEndian.PutUint16(f.g.mem.Bytes(f.hdrs[i]+6, 2), start)
	case flipTable:
		second := uint16(1)
		if wrong {
			second = 0
		}
		driver.PokeTable(f.g.mem.Host(f.tables[i]), 0, b.Addr, virtio.NetHdrLen, next, second)
		f.raw.desc(i, driver.Buf{Addr: f.tables[i], Len: 32}, indirect, 0)
		return
	}
	f.raw.desc(i, b, 0, 0)
}

// run flips all chains for ever, at varying moments, until the function that it returns is called.
func (f *flipper) run() (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ; n++ {
			select {
			case <-quit:
				return
			default:
			}
			for i := range uint16(flipHeads) {
				f.flip(i, (n+int(i))%2 == 0)
			}
		}
	}()
	return func() { close(quit); <-done }
}

// round offers every head once, wants each back once, and wants every frame that came through to be right.
func (f *flipper) round() {
	f.g.t.Helper()
	heads := make([]uint16, flipHeads)
	for i := range heads {
		heads[i] = uint16(i)
	}
	f.raw.offer(heads...)
	f.raw.returned(heads...)
	good := 0
	for {
		hdr, frame, ok, err := f.g.TryRecv()
		must(f.g.t, err)
		if !ok {
			break
		}
		f.judge(hdr, frame)
		good++
	}
	f.good, f.bad = f.good+good, f.bad+len(heads)-good
	_, err := f.g.PostRx(256)
	must(f.g.t, err)
}

func (f *flipper) judge(hdr virtio.NetHdr, frame []byte) {
	f.g.t.Helper()
	if len(frame) != flipFrame || int(frame[14]) >= flipHeads {
		f.g.t.Fatalf("a frame of %d bytes came through: % x", len(frame), head(frame))
	}
	i := int(frame[14])
	want := virtio.NetHdr{NumBuffers: 1}
	if i%flips == flipHeader {
		want.Flags, want.CsumStart, want.CsumOffset = virtio.HdrFNeedsCsum, 34, 6
	}
	if hdr != want || !bytes.Equal(frame, swapped(f.frames[i])) {
		f.g.t.Fatalf("frame %d came through wrong: header %+v, want %+v; % x", i, hdr, want, frame)
	}
}

// TestRING06_AvailableRingChanges lets entries of the available ring change between a right head and an impossible one: the ring
// breaks sooner or later, and comes back with a restart.
func TestRING06_AvailableRingChanges(t *testing.T) {
	g := newGuest(t, "null", ordinary())
	for range rounds(3, 30) {
		tx := g.raw(g.TX)
		tx.desc(0, g.put(frameOf(60, 1)), 0, 0)
		quit, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			for n := uint16(0); ; n++ {
				select {
				case <-quit:
					return
				default:
				}
				for i := range uint16(256) {
					g.TX.Ring.PokeAvail(i, (n+i)%2*0xffff)
				}
			}
		}()
		var failed error
		for end := time.Now().Add(patience); time.Now().Before(end); {
			idx := g.TX.Ring.PeekUsedIdx()
			g.TX.Ring.PokeAvailIdx(idx + 32)
			must(t, g.TX.Kick())
			if failed = g.TX.WaitErr(time.Millisecond); failed == nil {
				break
			}
		}
		close(quit)
		<-done
		must(t, failed)
		g.restart()
		must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 3), frontend.Direct))
		must(t, g.DrainTx(patience))
	}
}
