package experiments

import (
	"context"
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// ringSize is ringtest's default.
const ringSize = 256

// ringLayouts are the features of each.
var ringLayouts = map[string]virtio.Features{
	"split":          virtio.FVersion1 | virtio.FRingEventIdx,
	"packed":         virtio.FVersion1 | virtio.FRingEventIdx | virtio.FRingPacked,
	"inorder":        virtio.FVersion1 | virtio.FRingEventIdx | virtio.FInOrder,
	"packed-inorder": virtio.FVersion1 | virtio.FRingEventIdx | virtio.FRingPacked | virtio.FInOrder,
}

// rings is E7: what a descriptor costs by the ring's layout.
func rings() bench.Experiment {
	return bench.Experiment{
		Name: "E7", Command: "ring", Title: "Rings: split, packed, in order",
		Claim:  "packed rings are no slower than split ones from batches of 8 on; completion in order makes sending 1.12 times as fast",
		Source: "ringtest (tools/virtio); vhost_net in-order series (2025): tx 4.75 to 5.35 Mpps",
		Options: []bench.Option{
			{Name: "layout", Default: "packed,inorder", Full: "packed,inorder,packed-inorder",
				Help: "layouts to compare with split (`LIST` of packed, inorder, packed-inorder)"},
			{Name: "batch", Default: "1,8,32,64", Full: "1,2,4,8,16,32,64", Help: "chains shown together (`LIST`)"},
			{Name: "threads", Default: "1,2", Help: "driver and device take turns on one thread, or spin on two (`LIST`)"},
			{Name: "wait", Default: "spin", Full: "spin,sleep", Help: "how two threads wait for each other (`LIST` of spin, sleep)"},
			{Name: "cycles", Default: "32K", Full: "10000000", Help: "chains of one observation (`N`)"},
		},
		Build: func(p bench.Params) (list []bench.Comparison, err error) {
			layouts, err := p.List("layout", "packed", "inorder", "packed-inorder")
			if err != nil {
				return nil, err
			}
			batches, err := p.Sizes("batch", 1, ringSize)
			if err != nil {
				return nil, err
			}
			threads, err := p.Sizes("threads", 1, 2)
			if err != nil {
				return nil, err
			}
			waits, err := p.List("wait", "spin", "sleep")
			if err != nil {
				return nil, err
			}
			cycles, err := p.Size("cycles", 15*ringSize, 1<<30)
			if err != nil {
				return nil, err
			}
			for _, mode := range ringModes(threads, waits) {
				for _, layout := range layouts {
					for _, batch := range batches {
						list = append(list, ringComparison(layout, batch, mode, cycles, p.CPU(1)))
					}
				}
			}
			return list, nil
		},
	}
}

// ringMode is how driver and device take turns.
type ringMode string

const (
	oneThread ringMode = "one thread"
	twoSpin   ringMode = "two threads that spin"
	twoSleep  ringMode = "two threads that sleep"
)

func ringModes(threads []int, waits []string) (modes []ringMode) {
	for _, n := range threads {
		if n == 1 {
			modes = append(modes, oneThread)
			continue
		}
		for _, wait := range waits {
			modes = append(modes, map[string]ringMode{"spin": twoSpin, "sleep": twoSleep}[wait])
		}
	}
	return modes
}

// ringComparison judges what a descriptor costs; where threads sleep, waking them costs more than any layout saves.
func ringComparison(layout string, batch int, mode ringMode, cycles, cpu int) bench.Comparison {
	target := 0.0
	switch {
	case mode == twoSleep:
	case layout == "packed" && batch >= 8:
		target = 1
	case layout == "inorder":
		target = 1.12
	}
	return bench.Comparison{
		Variant: fmt.Sprintf("split against %s, batches of %d, %s", layout, batch, mode),
		A:       "split", B: layout, Target: target, Unit: "ns/chain",
		Open: func(context.Context) (bench.Runner, error) {
			r := &ringRunner{batch: batch, mode: mode, cycles: cycles / 15, cpu: cpu, rings: map[string]*ringPair{}}
			for _, l := range []string{"split", layout} {
				pair, err := newRingPair(ringLayouts[l])
				if err != nil {
					return nil, errors.Join(err, r.Close())
				}
				r.rings[l] = pair
			}
			return r, nil
		},
	}
}

// ringPair is both sides of a ring, each with a mapping of its own.
type ringPair struct {
	mem    *frontend.Memory
	table  *guestmem.Table
	driver driver.Queue
	device virtqueue.Ring
	batch  virtqueue.Batch
	buf    uint64
}

func newRingPair(features virtio.Features) (r *ringPair, err error) {
	r = &ringPair{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.mem, err = frontend.NewMemory(1 << 20); err != nil {
		return r, err
	}
	specs, fds := r.mem.Table()
	if r.table, err = guestmem.NewTable(specs, fds); err != nil {
		return r, err
	}
	packed := features.Has(virtio.FRingPacked)
	place, base := driver.Paged, virtqueue.Position(0)
	if packed {
		place, base = driver.PackedFormat, virtqueue.Position(1<<15|1<<31)
	}
	l := place(ringSize, 0)
	at, err := r.mem.Alloc(0, l.End, 4096)
	if err != nil {
		return r, err
	}
	if r.buf, err = r.mem.Alloc(0, ringSize*2048, 4096); err != nil {
		return r, err
	}
	cfg := driver.Config{Size: ringSize, Features: features,
		Desc: r.mem.Host(at + l.Desc), Avail: r.mem.Host(at + l.Avail), Used: r.mem.Host(at + l.Used)}
	if packed {
		r.driver, err = driver.NewPacked(cfg)
	} else {
		r.driver, err = driver.New(cfg)
	}
	if err != nil {
		return r, err
	}
	seen := func(gpa uint64) uintptr {
		host, _ := r.table.Lookup(gpa, 1)
		return host
	}
	r.device, err = virtqueue.New(virtqueue.Config{Size: ringSize, Features: features, Base: base, Mem: r.table,
		Desc: seen(at + l.Desc), Avail: seen(at + l.Avail), Used: seen(at + l.Used)})
	return r, err
}

func (r *ringPair) close() error {
	var errs []error
	if r.table != nil {
		errs = append(errs, r.table.Close())
	}
	if r.mem != nil {
		errs = append(errs, r.mem.Close())
	}
	return errors.Join(errs...)
}

// add shows n chains of 256 bytes to the device, as far as the ring has room for all of them.
func (r *ringPair) add(n int) (added int, err error) {
	if r.driver.Free() < n {
		return 0, nil
	}
	for i := range n {
		if _, err := r.driver.AddDirect(driver.Buf{Addr: r.buf + uint64(i)*2048, Len: 268}); err != nil {
			return i, err
		}
	}
	r.driver.Publish()
	return n, nil
}

// serve gives back what the driver has shown, up to n chains.
func (r *ringPair) serve(n int) (served int, err error) {
	for served < n {
		r.batch.Reset()
		got, err := r.device.Fill(&r.batch, min(n-served, virtqueue.MaxBatch))
		if got == 0 || err != nil {
			return served, err
		}
		r.device.CompleteBatch(&r.batch, 0, got)
		r.device.Publish(0)
		served += got
	}
	return served, nil
}

// reap takes back what was given back.
func (r *ringPair) reap() (n int, err error) {
	for {
		if _, _, ok := r.driver.GetUsed(); !ok {
			return n, r.driver.Err()
		}
		n++
	}
}
