package virtqueue_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

const eventIdx = virtio.FRingEventIdx

// NTF-03: the driver is called exactly when its event lies in what became used.
func TestNeedsCallByEventIndex(t *testing.T) {
	for _, c := range []struct {
		old, new, event uint16
		want            bool
	}{
		{3, 9, 5, true}, {3, 9, 3, true}, {3, 9, 8, true}, {3, 9, 9, false}, {3, 9, 2, false},
		{0xfffe, 3, 0xffff, true}, {0xfffe, 3, 1, true}, {0xfffe, 3, 3, false}, {0xfffe, 3, 0xfffd, false},
		{3, 3, 3, false}, {3, 3, 2, false},
	} {
		r := newRig(t, rigOptions{size: 16, features: eventIdx, start: c.old - 1})
		r.add(t, 1)
		r.serve(t)
		r.drv.PokeUsedEvent(c.old + 0x4000)
		if !r.dev.NeedsCall() {
			t.Error("the first completion of a life must call")
		}
		r.add(t, int(c.new-c.old))
		r.serve(t)
		r.drv.PokeUsedEvent(c.event)
		if got := r.dev.NeedsCall(); got != c.want {
			t.Errorf("%#x -> %#x, event %#x: call = %v, want %v", c.old, c.new, c.event, got, c.want)
		}
		if r.dev.NeedsCall() {
			t.Error("called twice for the same completions")
		}
	}
}

// Whoever does not ask for a whole lap of the index has to be called.
func TestNeedsCallAfterALap(t *testing.T) {
	r := newRig(t, rigOptions{size: 32768, features: eventIdx})
	r.add(t, 1)
	r.serve(t)
	r.dev.NeedsCall()
	r.takeUsed(t, []uint16{0})
	for range 2 {
		heads := r.add(t, 32768)
		r.serve(t)
		r.takeUsed(t, heads)
	}
	r.drv.PokeUsedEvent(0)
	if !r.dev.NeedsCall() {
		t.Error("65536 completions went by without a call")
	}
}

func TestNeedsCallByFlags(t *testing.T) {
	r := newRig(t, rigOptions{size: 16})
	if r.dev.NeedsCall() {
		t.Error("call for nothing")
	}
	for _, off := range []bool{false, true, false} {
		heads := r.add(t, 2)
		if off {
			r.drv.DisableCalls()
		} else {
			r.drv.EnableCalls()
		}
		r.serve(t)
		if got := r.dev.NeedsCall(); got == off {
			t.Errorf("calls disabled %v: call = %v", off, got)
		}
		r.takeUsed(t, heads)
	}
	r.drv.PokeAvailFlags(0xfffe)
	r.add(t, 1)
	r.serve(t)
	if !r.dev.NeedsCall() {
		t.Error("unknown flags stopped a call")
	}
}

func TestKicks(t *testing.T) {
	for _, features := range []virtio.Features{0, eventIdx} {
		r := newRig(t, rigOptions{size: 16, features: features, start: 65530})
		r.drv.PokeUsedIdx(65530)
		if r.dev.EnableKicks() {
			t.Error("work on an empty ring")
		}
		r.add(t, 1)
		if !r.drv.NeedsKick() {
			t.Errorf("%v: no kick although enabled", features)
		}
		if !r.dev.EnableKicks() {
			t.Errorf("%v: EnableKicks overlooks a chain", features)
		}
		r.dev.DisableKicks()
		for range 12 {
			r.add(t, 1)
			if r.drv.NeedsKick() {
				t.Errorf("%v: kick although disabled", features)
			}
		}
		if n := r.serve(t); n != 13 {
			t.Fatalf("%d served", n)
		}
		if r.dev.EnableKicks() {
			t.Errorf("%v: work on a drained ring", features)
		}
		r.add(t, 1)
		if !r.drv.NeedsKick() {
			t.Errorf("%v: no kick after EnableKicks", features)
		}
	}
}

// With event indexes DisableKicks leaves the ring alone, and a NO_NOTIFY that
// an earlier owner left behind is cleared.
func TestDisableKicksWritesNothing(t *testing.T) {
	r := newRig(t, rigOptions{size: 16, features: eventIdx})
	ring := bytesAt(host(t, r.mem, 0, 0x1000), 0x1000)
	before := bytes.Clone(ring)
	r.dev.DisableKicks()
	if !bytes.Equal(before, ring) {
		t.Error("DisableKicks wrote to the ring")
	}

	r = newRig(t, rigOptions{size: 16})
	r.dev.DisableKicks()
	if r.drv.PeekUsedFlags() != 1 {
		t.Error("DisableKicks did not set NO_NOTIFY")
	}
	for _, features := range []virtio.Features{0, eventIdx} {
		r.cfg.Features = features
		r.restart(t, 0)
		r.dev.EnableKicks()
		if r.drv.PeekUsedFlags() != 0 {
			t.Errorf("%v: NO_NOTIFY of the last life is still set", features)
		}
		r.dev.DisableKicks()
	}
}

// NTF-01: one chain at a time, kicked only when asked for, called only when
// asked for. Both sides sleep whenever they may; a lost wake-up hangs.
func TestPingPong(t *testing.T) {
	for _, features := range []virtio.Features{0, eventIdx, virtio.FInOrder} {
		t.Run("split/"+features.String(), func(t *testing.T) {
			r := newRig(t, rigOptions{size: 8, features: features})
			pingPong(t, r.drv, r.dev)
		})
		t.Run("packed/"+features.String(), func(t *testing.T) {
			r := newPackedRig(t, rigOptions{size: 7, features: features})
			pingPong(t, r.drv, r.dev)
		})
	}
}

func pingPong(t *testing.T, drv driver.Queue, dev virtqueue.Ring) {
	const rounds = 5000
	kick, call, done := make(chan struct{}, 1), make(chan struct{}, 1), make(chan error, 1)
	signal := func(c chan struct{}) {
		select {
		case c <- struct{}{}:
		default: // like an eventfd: already signaled
		}
	}
	go func() { done <- deviceLoop(dev, kick, func() { signal(call) }) }()
	defer func() {
		close(kick)
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	for i := range rounds {
		if _, err := drv.AddDirect(driver.Buf{Addr: bufGPA, Len: 1}); err != nil {
			t.Fatal(err)
		}
		drv.Publish()
		if drv.NeedsKick() {
			signal(kick)
		}
		for {
			if _, _, ok := drv.GetUsed(); ok {
				break
			}
			if drv.EnableCalls() {
				continue
			}
			select {
			case <-call:
			case <-time.After(5 * time.Second):
				t.Fatalf("round %d: no call within 5 s", i)
			}
		}
	}
}

// deviceLoop serves a ring until kick is closed, and sleeps in between.
func deviceLoop(dev virtqueue.Ring, kick <-chan struct{}, call func()) error {
	var b virtqueue.Batch
	for {
		b.Reset()
		n, err := dev.Fill(&b, 32)
		if err != nil {
			return err
		}
		if n > 0 {
			dev.DisableKicks()
			dev.CompleteBatch(&b, 0, n)
			dev.Publish(0)
			if dev.NeedsCall() {
				call()
			}
			continue
		}
		if dev.EnableKicks() {
			continue
		}
		if _, open := <-kick; !open {
			return nil
		}
	}
}
