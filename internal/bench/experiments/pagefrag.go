package experiments

import (
	"context"
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/fragalloc"
	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
)

// fragRing is the capacity of the ring between the threads of the kernel's page_frag_test.
const fragRing = 512

// pageFrag is E1u: fragments of pages, with a reference counted for each and with the references of a page taken at once.
func pageFrag() bench.Experiment {
	return bench.Experiment{
		Name: "E1u", Command: "pagefrag", Title: "Fragments: a counted reference for each against the bias of a page",
		Claim:  "the allocator alone gains 0.26 % without and 1.84 % with alignment (23.918 to 23.856 s, 23.876 to 23.444 s), at best 3.3 %",
		Source: "page_frag_test.ko of the page_frag_cache series (v9 cover, 200 runs of 512,000,000 on CPUs 16 and 17; v1 cover for 3.3 %)",
		Options: []bench.Option{
			{Name: "len", Default: "12", Help: "bytes of a fragment (`LIST`)"},
			{Name: "align", Default: "1,64", Help: "alignment of its start (`LIST` of powers of two)"},
			{Name: "prepare", Default: "off,on", Help: "prepare, probe and commit instead of alloc (`LIST` of off, on)"},
			{Name: "free", Default: "remote,local", Help: "who frees: another thread or the same one (`LIST` of remote, local)"},
			{Name: "n", Default: "1M", Full: "512000000", Help: "fragments of one observation (`N`)"},
		},
		Build: buildPageFrag,
	}
}

func buildPageFrag(p bench.Params) (list []bench.Comparison, err error) {
	lens, err := p.Sizes("len", 1, pagemem.MaxFrag)
	if err != nil {
		return nil, err
	}
	aligns, err := p.Sizes("align", 1, pagemem.PageSize)
	if err != nil {
		return nil, err
	}
	prepares, err := p.List("prepare", "off", "on")
	if err != nil {
		return nil, err
	}
	frees, err := p.List("free", "remote", "local")
	if err != nil {
		return nil, err
	}
	n, err := p.Size("n", 1024, 1<<30)
	if err != nil {
		return nil, err
	}
	for _, align := range aligns {
		if align&(align-1) != 0 {
			return nil, fmt.Errorf("--align: %d: accepted are powers of two", align)
		}
	}
	for _, free := range frees {
		for _, prepare := range prepares {
			for _, size := range lens {
				for _, align := range aligns {
					s := fragSetting{size: uint32(size), align: uint32(align), prepare: prepare == "on", remote: free == "remote", n: n, cpu: p.CPU(1)}
					list = append(list, s.comparison())
				}
			}
		}
	}
	return list, nil
}

// fragSetting is one way to use an allocator of fragments.
type fragSetting struct {
	size, align     uint32
	prepare, remote bool
	n, cpu          int
}

func (s fragSetting) comparison() bench.Comparison {
	target := 1.0026
	if s.align > 1 {
		target = 1.0184
	}
	how, where := "alloc", "freed here"
	if s.prepare {
		how = "prepare and commit"
	}
	if s.remote {
		where = "freed by another thread"
	}
	return bench.Comparison{
		Variant: fmt.Sprintf("%s, %d bytes, alignment %d, %s", how, s.size, s.align, where), A: "counted", B: "bias", Target: target, Unit: "ns/fragment",
		Open: func(context.Context) (bench.Runner, error) { return newFragRunner(s) },
	}
}

// fragRunner allocates fragments and has them freed.
type fragRunner struct {
	fragSetting
	arena    *pagemem.Arena
	counted  *fragalloc.RefPage
	bias     *fragalloc.Cache
	consumer *consumer
	given    uint64 // fragments that the consumer was given
	ids      [64]pagemem.PageID
}

func newFragRunner(s fragSetting) (*fragRunner, error) {
	a, err := pagemem.NewArena(pagemem.Config{Bytes: 64 << 20, Name: "vhostd-bench"})
	if err != nil {
		return nil, err
	}
	r := &fragRunner{fragSetting: s, arena: a, counted: fragalloc.NewRefPage(a), bias: fragalloc.NewCache(a)}
	if s.remote {
		if r.consumer, err = startConsumer(fragRing, 1, s.cpu, r.free); err != nil {
			return nil, errors.Join(err, a.Close())
		}
	}
	return r, nil
}

// free drops one reference for each fragment.
func (r *fragRunner) free(ids []pagemem.PageID) {
	for _, id := range ids {
		r.arena.Release(id, 1, stranger)
	}
}

// source is how a variant allocates.
func (r *fragRunner) source(variant string) func() (pagemem.Frag, error) {
	switch {
	case variant == "bias" && r.prepare:
		return r.prepareBias
	case variant == "bias":
		return func() (pagemem.Frag, error) { return r.bias.Alloc(r.size, r.align) }
	case r.prepare:
		return r.prepareCounted
	}
	return func() (pagemem.Frag, error) { return r.counted.Alloc(r.size, r.align) }
}

// prepareBias wants the probe to say what the prepare said.
func (r *fragRunner) prepareBias() (pagemem.Frag, error) {
	f, err := r.bias.Prepare(r.size, r.align)
	if err != nil {
		return f, err
	}
	if probed, ok := r.bias.Probe(r.size, r.align); !ok || probed != f {
		return f, fmt.Errorf("prepare gave %+v, then probe gave %+v, %v", f, probed, ok)
	}
	if r.bias.Commit(f, r.size) == 0 {
		return f, fmt.Errorf("the commit of %d bytes of %+v was refused", r.size, f)
	}
	f.Size = r.size
	return f, nil
}

// prepareCounted asks twice, as prepareBias does, and counts the reference when it commits.
func (r *fragRunner) prepareCounted() (pagemem.Frag, error) {
	w := r.counted.Window()
	f, ok := w.Rest(r.size, r.align)
	if !ok {
		return r.counted.Alloc(r.size, r.align) // with a page that has room
	}
	if probed, ok := w.Rest(r.size, r.align); !ok || probed != f {
		return f, fmt.Errorf("the page's rest is %+v, then %+v, %v", f, probed, ok)
	}
	if w.Commit(f, r.size, true) == 0 {
		return f, fmt.Errorf("the commit of %d bytes of %+v was refused", r.size, f)
	}
	r.arena.Ref(f.Page)
	f.Size = r.size
	return f, nil
}

func (r *fragRunner) Run(ctx context.Context, variant string) (bench.Sample, error) {
	alloc := r.source(variant)
	if err := r.verify(alloc); err != nil {
		return bench.Sample{}, err
	}
	const slices = 15
	rounds := max(1, r.n/slices/len(r.ids))
	cost, err := bench.Timed(slices, rounds*len(r.ids), func() error { return r.rounds(ctx, alloc, rounds) })
	if err != nil {
		return bench.Sample{}, err
	}
	return bench.Sample{Cost: cost}, r.settle()
}

// rounds allocates n times as many fragments as ids has, and ends when all are freed.
func (r *fragRunner) rounds(ctx context.Context, alloc func() (pagemem.Frag, error), n int) error {
	for range n {
		for i := range r.ids {
			f, err := alloc()
			if err != nil {
				return err
			}
			if uint32(f.Addr)&(r.align-1) != 0 {
				return fmt.Errorf("fragment at %#x is not aligned to %d", f.Addr, r.align)
			}
			if r.consumer == nil {
				r.ids[i] = f.Page
				continue
			}
			if err := r.consumer.give(ctx, f.Page); err != nil {
				return err
			}
			r.given++
		}
		if r.consumer == nil {
			r.free(r.ids[:])
		}
	}
	if r.consumer == nil {
		return nil
	}
	return r.consumer.await(ctx, r.given)
}

// verify fills fragments that are out together and wants each to keep what was written.
func (r *fragRunner) verify(alloc func() (pagemem.Frag, error)) error {
	frags := make([]pagemem.Frag, fragRing)
	for i := range frags {
		f, err := alloc()
		if err != nil {
			return err
		}
		for j := range bytesOf(f) {
			bytesOf(f)[j] = byte(i + j)
		}
		frags[i] = f
	}
	for i, f := range frags {
		for j, b := range bytesOf(f) {
			if b != byte(i+j) {
				return fmt.Errorf("fragment %d %+v was overwritten at byte %d", i, f, j)
			}
		}
		r.arena.Release(f.Page, 1, stranger)
	}
	return nil
}

func bytesOf(f pagemem.Frag) []byte {
	part := packet.Frag{Addr: f.Addr, Len: f.Size, Page: f.Page}
	return part.Bytes()
}

// settle wants no page to be in use once the allocators have let go of theirs.
func (r *fragRunner) settle() error {
	r.counted.Drain()
	r.bias.Drain()
	if n := r.arena.InUse(); n != 0 {
		return fmt.Errorf("%d pages are left over after all fragments were freed", n)
	}
	return nil
}

func (r *fragRunner) Close() error {
	if r.consumer != nil {
		r.consumer.stop()
	}
	return errors.Join(r.settle(), r.arena.Close())
}
