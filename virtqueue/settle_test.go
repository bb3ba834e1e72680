package virtqueue_test

import "testing"

// MIG-08: the used index is settled when the ring first runs.
func TestSettle(t *testing.T) {
	for _, c := range []struct {
		name   string
		before func(r *rig) // between the lives
		after  func(r *rig) // after the second life was started
		base   uint16
		slot   uint16
		idx    uint16
		moved  bool // the base was wrong
	}{
		{"zeroed before the base", func(r *rig) { r.drv.Reset(0) }, func(*rig) {}, 0, 0, 1, false},
		{"zeroed after the start", func(*rig) {}, func(r *rig) { r.drv.Reset(0) }, 0, 0, 1, false},
		{"zeroed after an idle look", func(*rig) {}, func(r *rig) {
			if !r.dev.Empty() {
				panic("old ring is not empty")
			}
			r.drv.Reset(0)
		}, 0, 0, 1, false},
		{"resumed", func(*rig) {}, func(*rig) {}, 500, 500 % 64, 501, false},
		{"resumed with base 0", func(*rig) {}, func(*rig) {}, 0, 500 % 64, 501, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, rigOptions{size: 64})
			for range 50 {
				heads := r.add(t, 10)
				r.serve(t)
				r.takeUsed(t, heads)
			}
			if p := r.dev.Position(); p != 500 {
				t.Fatalf("first life ended at %d", p)
			}
			c.before(r)
			r.restart(t, c.base)
			c.after(r)
			heads := r.add(t, 1)
			if got := r.serve(t); got != 1 {
				t.Fatalf("%d chains served", got)
			}
			if idx := r.drv.PeekUsedIdx(); idx != c.idx {
				t.Errorf("used index = %d, want %d", idx, c.idx)
			}
			if id, _ := r.drv.PeekUsed(c.slot); id != uint32(heads[0]) {
				t.Errorf("slot %d has head %d, want %d", c.slot, id, heads[0])
			}
			if r.dev.Rebased() != c.moved {
				t.Errorf("Rebased = %v", r.dev.Rebased())
			}
		})
	}
}

// A ring that never ran reports where it would have resumed.
func TestPositionOfAnIdleRing(t *testing.T) {
	r := newRig(t, rigOptions{size: 64, start: 300})
	r.restart(t, 7)
	if p := r.dev.Position(); p != 300 {
		t.Errorf("Position = %d, want 300", p)
	}
}

// A used index that changes while chains are peeked does not move them.
func TestNoSettlingUnderPeekedChains(t *testing.T) {
	r := newRig(t, rigOptions{size: 16})
	heads := r.add(t, 3)
	r.fill(t, 2)
	r.drv.PokeUsedIdx(2)
	if n := r.fill(t, 32); n != 1 || r.b.Chains[0].Head != heads[2] {
		t.Fatalf("%d chains, %+v", n, r.b.Chains[0])
	}
	r.dev.Unfill(1)
	for _, h := range heads[:2] {
		r.dev.Complete(h, 0)
	}
	if r.dev.Publish(0) != 2 || r.dev.Position() != 2 {
		t.Errorf("Position = %d", r.dev.Position())
	}
}
