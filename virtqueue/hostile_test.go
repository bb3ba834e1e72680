package virtqueue_test

import (
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// checkBatch is the function of that name, and heads lie in the table.
func (r *rig) checkBatch(t *testing.T) {
	t.Helper()
	checkBatch(t, r.b, r.mem, int(r.cfg.Size))
	for i := range r.b.N {
		if c := r.b.Chains[i]; c.Head >= r.cfg.Size {
			t.Fatalf("chain %d = %+v", i, c)
		}
	}
}

// FuzzChains gives the guest's memory over to the input: first ring, tables
// and index, then pieces written over it between the device's calls.
func FuzzChains(f *testing.F) {
	d := func(addr uint64, n uint32, flags, next uint16) []byte {
		b := binary.LittleEndian.AppendUint64(nil, addr)
		b = binary.LittleEndian.AppendUint32(b, n)
		b = binary.LittleEndian.AppendUint16(b, flags)
		return binary.LittleEndian.AppendUint16(b, next)
	}
	f.Add(append(d(bufGPA, 64, next, 1), d(bufGPA, 1, 0, 0)...), []byte{0, 16, 8, 2}, false)
	f.Add(append(d(bufGPA, 32, indirect, 0), d(0, 32, indirect, 0)...), []byte{0, 2, 0, 1, 3, 4, 1, 9}, true)
	f.Add(append(d(seam-8, 48, indirect, 0), d(seam-1, 0xffffffff, 0, 0)...), []byte{3, 64, 40, 1}, false)
	f.Add(d(^uint64(0), 2, write|next, 0), []byte{}, true)
	f.Fuzz(func(t *testing.T, image, script []byte, rx bool) {
		r := newRig(t, rigOptions{size: 8, features: ind | eventIdx, rx: rx, regions: chainRegions})
		defer r.mem.Close()
		ring := bytesAt(host(t, r.mem, ringGPA, 0x1000), 0x1000)
		tables := bytesAt(host(t, r.mem, bufGPA, 0x1000), 0x1000)
		copy(ring, image)
		copy(tables, image)
		r.restart(t, 0)
		r.drv.PokeUsedIdx(0)
		for i := range uint16(8) {
			r.drv.PokeAvail(i, i)
		}
		r.drv.PokeAvailIdx(8)
		runScript(t, r, script, ring, tables)
	})
}

// runScript plays steps of four bytes: what to write, how much, where, and
// what the device does then.
func runScript(t *testing.T, r *rig, script, ring, tables []byte) {
	for ; len(script) >= 4; script = script[4:] {
		what, n, where, act := script[0], int(script[1]), int(script[2]), script[3]
		target := ring
		if what&1 != 0 {
			target = tables
		}
		copy(target[where:where+n], script[min(4, len(script)):])
		if what&2 != 0 {
			r.drv.PokeAvailIdx(uint16(where))
		}
		r.b.Reset()
		got, err := r.dev.Fill(r.b, int(act))
		var broken *virtqueue.BrokenError
		if err != nil && (!errors.As(err, &broken) || got != 0) || got != r.b.N {
			t.Fatalf("Fill = %d, %v, batch has %d", got, err, r.b.N)
		}
		r.checkBatch(t)
		keep := got
		if act&0x80 != 0 {
			keep = got / 2
		}
		r.dev.Unfill(got - keep)
		r.dev.CompleteBatch(r.b, 0, keep)
		if n := r.dev.Publish(int(act & 3)); n > 0 && uint16(r.dev.Position())-r.drv.PeekUsedIdx() != uint16(r.dev.Staged()) {
			t.Fatalf("position %d, used index %d, staged %d", r.dev.Position(), r.drv.PeekUsedIdx(), r.dev.Staged())
		}
		r.dev.NeedsCall()
		r.dev.EnableKicks()
	}
}

// RING-06: a guest that changes descriptors, heads and indirect tables all the
// time gets valid segments or faults, and each head back exactly once.
func TestFlippingGuest(t *testing.T) {
	r := newRig(t, rigOptions{size: 64, features: ind})
	tableHost := host(t, r.mem, tableGPA, 64)
	driver.PokeTable(tableHost, 0, bufGPA, 10, next, 1)
	driver.PokeTable(tableHost, 1, bufGPA, 10, 0, 0)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for k := uint16(0); !stop.Load(); k++ {
			i := k & 63
			r.drv.PokeDesc(i, bufGPA, 0xfffff000, 0, 0)
			r.drv.PokeDesc(i, 0x99999999, 60, next, i)
			r.drv.PokeDesc(i, tableGPA, 32, indirect, 0)
			driver.PokeTable(tableHost, 0, bufGPA, 10, next, 0)
			driver.PokeTable(tableHost, 0, bufGPA, 10, next, 1)
			r.drv.PokeDesc(i, bufGPA, 60, 0, 0)
		}
	}()
	served := uint16(0)
	for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); {
		for range 32 {
			r.drv.PokeHead(r.drv.AvailIdx() & 63)
		}
		r.drv.Publish()
		if n := r.fill(t, 32); n != 32 {
			t.Errorf("Fill = %d", n)
			break
		}
		r.checkBatch(t)
		for i := range 32 {
			if got := r.b.Chains[i].Head; got != served&63 {
				t.Fatalf("head %d, want %d", got, served&63)
			}
			served++
		}
		r.dev.CompleteBatch(r.b, 0, 32)
		r.dev.Publish(0)
	}
	stop.Store(true)
	wg.Wait()
	if r.drv.PeekUsedIdx() != served {
		t.Errorf("used index %d, served %d", r.drv.PeekUsedIdx(), served)
	}
}

// As TestBothSidesAtOncePacked, in a split ring.
func TestBothSidesAtOnce(t *testing.T) {
	for _, features := range []virtio.Features{0, virtio.FInOrder} {
		r := newRig(t, rigOptions{size: 64, features: ind | eventIdx | features, start: 60000})
		payload, tables := host(t, r.mem, bufGPA, 0x40000), host(t, r.mem, tableGPA, 0x10000)
		bothSides(t, r.drv, r.dev, payload, tables, features == 0, 20000)
	}
}

func TestFaultNames(t *testing.T) {
	seen := map[string]bool{virtqueue.FaultNone.String(): true}
	for _, f := range virtqueue.Faults() {
		if s := f.String(); s == "" || s == "unknown" || seen[s] {
			t.Errorf("fault %d is called %q", f, s)
		}
		seen[f.String()] = true
	}
	if virtqueue.Fault(200).String() != "unknown" {
		t.Error("fault 200 has a name")
	}
}
