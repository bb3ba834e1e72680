package cases

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// numberedTo is frame n of the ones that s sends to another station.
func (s *station) numberedTo(dst []byte, n uint64) []byte {
	f := numbered(n)
	copy(f, dst)
	copy(f[6:], s.mac)
	return f
}

// take returns the next frame from a station to this one, if there is one; up to so many others are thrown away.
func (s *station) take(from *station) (frame []byte, ok bool, err error) {
	for range 1024 {
		if _, err := s.PostRx(s.RX.Driver.Size()); err != nil {
			return nil, false, err
		}
		_, frame, ok, err := s.TryRecv()
		if err != nil || !ok || bytes.Equal(frame[6:12], from.mac) && bytes.Equal(frame[:6], s.mac) {
			return frame, ok, err
		}
	}
	return nil, false, nil
}

// relay moves n numbered frames from one station to another, a window at a time, on its own goroutine or not. Every one has to arrive
// once, in order and whole.
func relay(from, to *station, n uint64) error {
	for sent, got := uint64(0), uint64(0); got < n; {
		for ; sent < n && sent-got < window; sent++ {
			if err := from.Stage(virtio.NetHdr{}, from.numberedTo(to.mac, sent), frontend.Layout(sent%3)); err != nil {
				return fmt.Errorf("frame %d: %w", sent, err)
			}
		}
		if err := from.TX.Flush(); err != nil {
			return err
		}
		frame, ok, err := to.take(from)
		if err == nil && !ok {
			err = to.RX.WaitUsed(patience)
		}
		if err != nil {
			return fmt.Errorf("%s to %s after %d frames: %w", from.name, to.name, got, err)
		}
		if !ok {
			continue
		}
		if !bytes.Equal(frame, from.numberedTo(to.mac, got)) {
			return fmt.Errorf("%s to %s: frame %d has number %d and %d bytes", from.name, to.name, got, number(frame), len(frame))
		}
		got++
	}
	return from.DrainTx(patience)
}

// insist moves n frames one at a time and sends again what was lost, for stations whose inboxes others fill.
func insist(from, to *station, n uint64) error {
	for i := range n {
		want := from.numberedTo(to.mac, i)
		for begin := time.Now(); ; {
			if err := first(func() error { return from.SendTx(virtio.NetHdr{}, want, frontend.Direct) }, func() error { return from.DrainTx(patience) }); err != nil {
				return err
			}
			frame, err := to.await(from, 50*time.Millisecond)
			if err != nil {
				return err
			}
			if bytes.Equal(frame, want) {
				break
			}
			if time.Since(begin) > patience {
				return fmt.Errorf("%s to %s: frame %d did not arrive within %v", from.name, to.name, i, patience)
			}
		}
	}
	return nil
}

// await waits for a frame of a station; nil if none comes.
func (s *station) await(from *station, wait time.Duration) ([]byte, error) {
	for end := time.Now().Add(wait); ; {
		frame, ok, err := s.take(from)
		if ok || err != nil {
			return frame, err
		}
		left := time.Until(end)
		if left <= 0 {
			return nil, nil
		}
		if err := s.RX.WaitUsed(left); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, err
		}
	}
}

// acquaint lets every station know where the others are.
func acquaint(t testing.TB, all ...*station) {
	t.Helper()
	for _, s := range all {
		f := s.to(everybody, 60, s.mac[5])
		for _, other := range all {
			if other != s {
				other.gets(f)
			}
		}
	}
}

// packed are ordinary options with packed rings.
func packed() frontend.Options {
	o := ordinary()
	o.Features |= virtio.FRingPacked
	return o
}

// TestSwitchKeepsEveryFrame: a receiver that keeps up gets every frame, while other stations do the same.
func TestSwitchKeepsEveryFrame(t *testing.T) {
	n := uint64(rounds(5000, 1_000_000))
	d, a := segmentOf(t, "", ordinary(), 1)
	b, c, e := d.join(2, "", packed(), 1), d.join(3, "", ordinary(), 1), d.join(4, "", packed(), 1)
	acquaint(t, a, b, c, e)
	end := background(t, func(uint64) error { return relay(c, e, 100) })
	must(t, relay(a, b, n))
	must(t, relay(b, a, n))
	must(t, end())
	for _, name := range []string{"vm0", "vm1", "vm2", "vm3"} {
		if lost := d.lost(name, "port_backlog_full") + d.lost(name, "port_memory_full"); lost > 0 {
			t.Errorf("%s lost %d frames", name, lost)
		}
	}
}

// TestSwitchCountsLostFrames: what a receiver that does not keep up loses is counted, and the rest comes in order.
func TestSwitchCountsLostFrames(t *testing.T) {
	n := uint64(rounds(3000, 200_000))
	d, a := segmentOf(t, "", ordinary(), 1)
	b := d.join(2, "", ordinary(), 1)
	acquaint(t, a, b)
	for i := range n {
		must(t, a.SendTx(virtio.NetHdr{}, a.numberedTo(b.mac, i), frontend.Direct))
		must(t, a.DrainTx(patience))
	}
	got, next := uint64(0), uint64(0)
	for {
		frame, err := b.await(a, quiet)
		must(t, err)
		if frame == nil {
			break
		}
		if i := number(frame); i < next || !bytes.Equal(frame, a.numberedTo(b.mac, i)) {
			t.Fatalf("frame %d with %d bytes came after frame %d", i, len(frame), next)
		} else {
			next = i + 1
		}
		got++
	}
	lost := d.lost("vm1", "port_backlog_full") + d.lost("vm1", "port_memory_full")
	if got+lost != n || lost == 0 || got < 512 {
		t.Errorf("%d frames sent, %d received, %d counted as lost", n, got, lost)
	}
}

// TestPERF03_NoBuffersAtAll: a guest that never offers a buffer, is flooded and sends broadcasts itself delays nobody.
func TestPERF03_NoBuffersAtAll(t *testing.T) {
	d, a := segmentOf(t, "", ordinary(), 1)
	b, c := d.join(2, "", packed(), 1), d.join(3, "", ordinary(), 1)
	acquaint(t, a, b, c)
	s := d.joinSilently(4, "", ordinary(), 1)
	f := s.to(everybody, 60, 4)
	for _, other := range []*station{a, b, c} {
		other.gets(f)
	}
	end := background(t, func(i uint64) error {
		dst := s.mac
		if i%16 == 0 {
			dst = everybody
		}
		return first(func() error { return c.SendTx(virtio.NetHdr{}, c.numberedTo(dst, i), frontend.Direct) }, func() error { return c.DrainTx(patience) })
	})
	must(t, relay(a, b, uint64(rounds(3000, 300_000))))
	must(t, relay(b, a, uint64(rounds(3000, 300_000))))
	eventually(t, "the slow guest loses frames", func() bool { return d.lost("vm3", "port_backlog_full")+d.lost("vm3", "port_memory_full") > 0 })
	must(t, relay(a, b, 1000))
	must(t, end())
}

// background repeats f on its own goroutine until end is called, or the test ends, or it fails.
func background(t testing.TB, f func(i uint64) error) (end func() error) {
	quit, done := make(chan struct{}), make(chan struct{})
	var err error
	go func() {
		defer close(done)
		for i := uint64(0); err == nil; i++ {
			select {
			case <-quit:
				return
			default:
				err = f(i)
			}
		}
	}()
	halt := sync.OnceFunc(func() { close(quit) })
	end = func() error { halt(); <-done; return err }
	t.Cleanup(func() { _ = end() }) // a test that fails unmaps the guest's memory next
	return end
}

// TestSwitchCopiesBeforeItChanges: one group frame that some receivers get finished and others as it was sent. The latter look only
// after the former's copies were made, and the sender's buffers have been used again.
func TestSwitchCopiesBeforeItChanges(t *testing.T) {
	const count = 24 // of frames; each has its segments' worth of buffers
	d, a := segmentOf(t, "", offloading(0), 1)
	first, full, second := d.join(3, "", offloading(0), 1), d.join(4, "", offloading(canReceive), 1), d.join(5, "", offloading(0), 1)
	a.mac = []byte{2, 0, 0, 0, 0, 1} // of segment
	shape := func(i int) (segment, virtio.NetHdr) {
		s := segment{v6: i%2 == 1, tags: i % 3, seq: uint32(i) << 20, payload: text(3000 + i)}
		return s, s.marks(mss)
	}
	for i := range count {
		s, marks := shape(i)
		frame, _ := s.frame()
		must(t, a.SendTx(marks, frame, frontend.Chained))
	}
	must(t, a.DrainTx(patience))
	for _, g := range []*station{first, second} {
		for i := range count {
			s, _ := shape(i)
			g.segments(s)
		}
	}
	a.to(everybody, 1400, 9)
	for i := range count {
		s, marks := shape(i)
		frame, _ := s.frame()
		hdr, got := full.recv()
		if hdr.NumBuffers = 0; hdr != marks || !bytes.Equal(got, frame) {
			t.Fatalf("frame %d: header %+v, want %+v and the frame as it was sent", i, hdr, marks)
		}
	}
}

// TestB21_Storms: a guest that floods on all its queues, in batches, cannot keep honest ones from each other.
func TestB21_Storms(t *testing.T) {
	storms := map[string]func(frame []byte, i uint64){
		"groups":           func(f []byte, _ uint64) { copy(f, everybody) },
		"unknown stations": func(f []byte, i uint64) { binary.BigEndian.PutUint32(f[2:], uint32(i)) },
		"random sources": func(f []byte, i uint64) {
			copy(f, everybody)
			binary.BigEndian.PutUint32(f[8:], uint32(i*2654435761))
		},
		"an honest station's address": func(f []byte, _ uint64) { copy(f, []byte{2, 0, 0, 0, 0, 1}); f[11] = 3 },
	}
	for name, change := range storms {
		t.Run(name, func(t *testing.T) {
			d, a := segmentOf(t, "", ordinary(), 1)
			b, evil := d.join(2, "", ordinary(), 1), d.join(3, "", ordinary(), 4)
			acquaint(t, a, b, evil)
			pages := d.switches().ArenaPages
			end := background(t, func(i uint64) error {
				for _, p := range evil.all {
					for j := range uint64(64) {
						frame := frameOf(1400, 1)
						copy(frame[6:], evil.mac)
						frame[0] = 2
						change(frame, i*64+j)
						if err := p.Stage(virtio.NetHdr{}, frame, frontend.Direct); errors.Is(err, frontend.ErrFull) {
							break
						} else if err != nil {
							return err
						}
					}
					if err := p.TX.Flush(); err != nil {
						return err
					}
				}
				return nil
			})
			// Honest guests that are asleep most of the time are woken in between.
			must(t, insist(a, b, uint64(rounds(5, 100))))
			must(t, insist(b, a, uint64(rounds(5, 100))))
			begin := time.Now()
			s := d.switches()
			soon(t, "the status was answered beside the flood", begin)
			must(t, end())
			if n := s.Switches[0].Stations; n > 128+2 {
				t.Errorf("%d stations are known of one guest", n-2)
			}
			if s.ArenaPages > pages+16384 {
				t.Errorf("%d pages in use, were %d", s.ArenaPages, pages)
			}
			for _, who := range []string{"vm0", "vm1"} {
				t.Logf("%s lost %d and %d frames", who, d.lost(who, "port_backlog_full"), d.lost(who, "port_memory_full"))
			}
		})
	}
}
