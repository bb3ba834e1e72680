package experiments

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/fragalloc"
	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
)

// rxDrop is E4: a receiver that looks at each frame and drops it, with and without recycling.
func rxDrop() bench.Experiment {
	return bench.Experiment{
		Name: "E4", Command: "rxdrop", Title: "Received frames dropped: pages to the allocator or recycled",
		Claim:  "recycling raises the drop rate of 64-byte frames by 10 % (296 to 326 kpps), and the allocator leaves the profile",
		Source: "mvneta: recycle buffers (page_pool recycling v8, 5/5), EspressoBIN",
		Options: []bench.Option{
			{Name: "frame", Default: "64", Help: "bytes of a frame (`LIST`)"},
			{Name: "n", Default: "16K", Full: "4M", Help: "frames of one observation (`N`)"},
		},
		Build: func(p bench.Params) ([]bench.Comparison, error) {
			frames, err := p.Sizes("frame", 60, pagemem.PageSize)
			if err != nil {
				return nil, err
			}
			n, err := p.Size("n", 1024, 1<<30)
			if err != nil {
				return nil, err
			}
			var list []bench.Comparison
			for _, size := range frames {
				list = append(list, bench.Comparison{
					Variant: fmt.Sprintf("%d bytes, recycle off against on", size), A: "off", B: "on", Target: 1.10, Unit: "ns/frame",
					Open: func(context.Context) (bench.Runner, error) { return newDropRunner(pool.Config{}, size, n) },
				}, profileComparison("off", size, 0), profileComparison("on", size, allocatorShare))
			}
			return list, nil
		},
	}
}

// dropRunner receives frames from a source in memory outside of the Go heap.
type dropRunner struct {
	*poolRunner
	source  pagemem.PageID
	size    int
	at      int    // frames at once
	ipv4    uint64 // frames that parsed as such
	packets [64]packet.Packet
	copies  [64]fragalloc.CopyOp
}

func newDropRunner(cfg pool.Config, size, n int) (*dropRunner, error) {
	p, err := newPoolRunnerOf(cfg, n)
	if err != nil {
		return nil, err
	}
	r := &dropRunner{poolRunner: p, size: size, at: len(p.ids)}
	var ok bool
	if r.source, ok = p.arena.Alloc(0, pagemem.NoReserve); !ok {
		return nil, errors.Join(errExhausted, p.Close())
	}
	page := packet.Frag{Addr: p.arena.Addr(r.source), Len: pagemem.PageSize}
	frame := page.Bytes()
	clear(frame)
	binary.BigEndian.PutUint16(frame[12:], 0x0800)
	frame[14] = 0x45
	return r, nil
}

func (r *dropRunner) Run(_ context.Context, variant string) (bench.Sample, error) {
	recycle := variant == "on"
	if err := r.batches(recycle, 4); err != nil { // fills the pool's cache
		return bench.Sample{}, err
	}
	before, parsed := r.arena.Stats().Allocs, r.ipv4
	const slices = 15
	rounds := max(1, r.n/slices/r.at)
	frames := rounds * r.at
	cost, err := bench.Timed(slices, frames, func() error { return r.batches(recycle, rounds) })
	if err != nil {
		return bench.Sample{}, err
	}
	calls := r.arena.Stats().Allocs - before
	if recycle && calls != 0 {
		return bench.Sample{}, fmt.Errorf("the arena was asked for pages %d times although all are recycled", calls)
	}
	if got := r.ipv4 - parsed; got != uint64(slices*frames) {
		return bench.Sample{}, fmt.Errorf("%d of %d frames arrived", got, slices*frames)
	}
	return bench.Sample{Cost: cost, Counters: map[string]float64{"arena calls per frame": float64(calls) / float64(slices*frames)}}, nil
}

// batches receives, looks at and drops n batches.
func (r *dropRunner) batches(recycle bool, n int) error {
	src := r.arena.Addr(r.source)
	ids, packets, copies := r.ids[:r.at], r.packets[:r.at], r.copies[:r.at]
	for range n {
		if r.pool.AllocN(ids) != len(ids) {
			return errExhausted
		}
		for i, id := range ids {
			p := &packets[i]
			p.Reset()
			p.Append(packet.Frag{Addr: r.arena.Addr(id), Len: uint32(r.size), Page: id})
			copies[i] = fragalloc.CopyOp{Dst: r.arena.Addr(id), Src: src, N: uint64(r.size)}
		}
		fragalloc.CopyVec(copies)
		for i := range packets {
			head := packets[i].Bytes(0)
			if binary.BigEndian.Uint16(head[12:]) == 0x0800 && head[14]>>4 == 4 {
				r.ipv4++
			}
		}
		if recycle {
			packet.Release(r.arena, packets, r.owner)
			continue
		}
		// The pool lets a page go, and whoever drops the frame frees it.
		for _, id := range ids {
			r.arena.Ref(id)
			r.pool.Put(id, 1, r.owner)
			r.arena.Unref(id, 1)
		}
	}
	return nil
}

func (r *dropRunner) Close() error {
	r.arena.Unref(r.source, 1)
	return r.poolRunner.Close()
}
