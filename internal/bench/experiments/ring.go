package experiments

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

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
			cycles, err := p.Size("cycles", 15*ringSize, 1<<30)
			if err != nil {
				return nil, err
			}
			for _, n := range threads {
				for _, layout := range layouts {
					for _, batch := range batches {
						list = append(list, ringComparison(layout, batch, n, cycles, p.CPU(1)))
					}
				}
			}
			return list, nil
		},
	}
}

func ringComparison(layout string, batch, threads, cycles, cpu int) bench.Comparison {
	target := 0.0
	switch {
	case layout == "packed" && batch >= 8:
		target = 1
	case layout == "inorder":
		target = 1.12
	}
	return bench.Comparison{
		Variant: fmt.Sprintf("split against %s, batches of %d, %s", layout, batch, map[int]string{1: "one thread", 2: "two threads"}[threads]),
		A:       "split", B: layout, Target: target, Unit: "ns/chain",
		Open: func(context.Context) (bench.Runner, error) {
			r := &ringRunner{batch: batch, threads: threads, cycles: cycles / 15, cpu: cpu, rings: map[string]*ringPair{}}
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

// ringRunner sends cycles of chains round a ring.
type ringRunner struct {
	batch, threads, cycles, cpu int
	rings                       map[string]*ringPair
}

func (r *ringRunner) Run(ctx context.Context, variant string) (bench.Sample, error) {
	pair := r.rings[variant]
	if r.threads == 1 {
		cost, err := bench.Timed(15, r.cycles, func() error { return r.turns(pair) })
		return bench.Sample{Cost: cost}, err
	}
	var quit atomic.Bool
	ended := make(chan error, 1)
	started := make(chan error)
	go func() {
		unlock, err := bench.LockThread(r.cpu)
		started <- err
		if err != nil {
			return
		}
		defer unlock()
		for err == nil && !quit.Load() {
			_, err = pair.serve(ringSize)
		}
		ended <- err
	}()
	if err := <-started; err != nil {
		return bench.Sample{}, err
	}
	cost, err := bench.Timed(15, r.cycles, func() error { return r.spin(ctx, pair) })
	quit.Store(true)
	return bench.Sample{Cost: cost}, errors.Join(err, <-ended)
}

// turns is driver and device one after the other.
func (r *ringRunner) turns(pair *ringPair) error {
	for done := 0; done < r.cycles; {
		n := min(r.batch, r.cycles-done)
		added, err := pair.add(n)
		if err != nil {
			return err
		}
		if served, err := pair.serve(n); served != added || err != nil {
			return fmt.Errorf("%d chains added, %d served: %w", added, served, err)
		}
		reaped, err := pair.reap()
		if reaped != added || err != nil {
			return fmt.Errorf("%d chains added, %d came back: %w", added, reaped, err)
		}
		done += reaped
	}
	return nil
}

// spin is the driver's side against a device on another thread, with as many batches under way as fit.
func (r *ringRunner) spin(ctx context.Context, pair *ringPair) error {
	added, done := 0, 0
	for idle := 0; done < r.cycles; idle++ {
		if added < r.cycles {
			n, err := pair.add(min(r.batch, r.cycles-added))
			if err != nil {
				return err
			}
			added += n
		}
		n, err := pair.reap()
		if err != nil {
			return err
		}
		if n > 0 {
			done, idle = done+n, 0
		}
		if idle&0xfffff == 0xfffff && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

func (r *ringRunner) Close() error {
	var errs []error
	for _, pair := range r.rings {
		errs = append(errs, pair.close())
	}
	return errors.Join(errs...)
}
