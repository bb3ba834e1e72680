package experiments

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/fragalloc"
)

// area is where packets are copied to: destinations that are used one after the other, and again when all were.
type area struct {
	dst, src []byte
	size     int // of a packet
	stride   int // between destinations: whole cache lines
	at       int
	ops      []fragalloc.CopyOp
	sum      uint64 // of what was read, so that reading is not left out
}

// newArea maps bytes of destinations for packets of the size, copied so many at once.
func newArea(bytes, size, batch int) (*area, error) {
	a := &area{size: size, stride: (size + 63) &^ 63, ops: make([]fragalloc.CopyOp, batch)}
	bytes = max(bytes, a.stride)
	var err error
	if a.dst, err = mapMemory(bytes); err != nil {
		return nil, err
	}
	if a.src, err = mapMemory(batch * a.stride); err != nil {
		return nil, errors.Join(err, unix.Munmap(a.dst))
	}
	for i := range a.src {
		a.src[i] = byte(i)
	}
	return a, nil
}

// mapMemory maps memory that is there already.
func mapMemory(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	return b, nil
}

func (a *area) close() error { return errors.Join(unix.Munmap(a.dst), unix.Munmap(a.src)) }

// copy copies a batch by one call of copyVec for each fence packets.
func (a *area) copy(copyVec func([]fragalloc.CopyOp), fence int) {
	dst, src := addressOf(a.dst), addressOf(a.src)
	for i := range a.ops {
		if a.at+a.stride > len(a.dst) {
			a.at = 0
		}
		a.ops[i] = fragalloc.CopyOp{Dst: dst + uintptr(a.at), Src: src + uintptr(i*a.stride), N: uint64(a.size)}
		a.at += a.stride
	}
	for i := 0; i < len(a.ops); i += fence {
		copyVec(a.ops[i:min(i+fence, len(a.ops))])
	}
}

// read reads every packet of the last batch, a word of each line.
func (a *area) read() {
	base := addressOf(a.dst)
	for i := range a.ops {
		at := int(a.ops[i].Dst - base)
		for off := 0; off+8 <= a.size; off += 64 {
			a.sum += uint64(a.dst[at+off])
		}
	}
}

// check wants the last batch to be where it was copied to.
func (a *area) check() error {
	base := addressOf(a.dst)
	for i := range a.ops {
		at := int(a.ops[i].Dst - base)
		if len(a.ops)*a.stride > len(a.dst) && i < len(a.ops)-len(a.dst)/a.stride {
			continue // overwritten by a later one
		}
		if string(a.dst[at:at+a.size]) != string(a.src[i*a.stride:i*a.stride+a.size]) {
			return fmt.Errorf("packet %d of a batch is damaged", i)
		}
	}
	return nil
}

// walk is a chain of cache lines in random order: somebody's working set.
type walk struct {
	memory []byte
	next   []uint32
	at     uint32
}

func newWalk(bytes int) (*walk, error) {
	m, err := mapMemory(bytes)
	if err != nil {
		return nil, err
	}
	w := &walk{memory: m, next: make([]uint32, bytes/64)}
	order := rand.New(rand.NewPCG(1, 1)).Perm(len(w.next))
	for i, line := range order {
		w.next[line] = uint32(order[(i+1)%len(order)])
	}
	// The chain lies in the lines themselves, so that a step is one access.
	for line, next := range w.next {
		m[line*64], m[line*64+1], m[line*64+2], m[line*64+3] = byte(next), byte(next>>8), byte(next>>16), byte(next>>24)
	}
	w.next = nil
	return w, nil
}

// steps takes n steps, each of which needs the one before.
func (w *walk) steps(n int) {
	at := w.at
	for range n {
		b := w.memory[at*64 : at*64+4]
		at = uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
	}
	w.at = at
}

func (w *walk) close() error { return unix.Munmap(w.memory) }
