package driver

// Layout places the three areas of a split ring in a piece of memory. All
// fields are byte offsets into it.
type Layout struct {
	Desc, Avail, Used uint64
	End               uint64 // first byte after the ring
}

func areas(size int) (desc, avail, used uint64) {
	n := uint64(size)
	return 16 * n, 6 + 2*n, 6 + 8*n
}

func align(n, to uint64) uint64 { return (n + to - 1) &^ (to - 1) }

// Packed places the areas as closely as the alignments of 16, 2 and 4 bytes
// allow, from offset at on, which is rounded up to 16.
func Packed(size int, at uint64) Layout {
	desc, avail, used := areas(size)
	l := Layout{Desc: align(at, 16)}
	l.Avail = l.Desc + desc
	l.Used = align(l.Avail+avail, 4)
	l.End = l.Used + used
	return l
}

// Paged is the legacy layout: the used ring begins on a page of its own
// (virtio 1.3 section 2.7.2).
func Paged(size int, at uint64) Layout {
	desc, avail, used := areas(size)
	l := Layout{Desc: align(at, 4096)}
	l.Avail = l.Desc + desc
	l.Used = align(l.Avail+avail, 4096)
	l.End = l.Used + used
	return l
}

// Odd places each area at the worst address that is still legal: the
// descriptor table at an odd multiple of 16, the available ring at an odd
// multiple of 2 and the used ring at an odd multiple of 4.
func Odd(size int, at uint64) Layout {
	desc, avail, used := areas(size)
	l := Layout{Desc: align(at, 32) + 16}
	l.Avail = align(l.Desc+desc, 16) + 2
	l.Used = align(l.Avail+avail, 16) + 4
	l.End = l.Used + used
	return l
}

// PackedFormat places the descriptor ring and the two event suppression
// structures of a packed ring at the worst addresses that are legal: odd
// multiples of 16, 4 and 4.
func PackedFormat(size int, at uint64) Layout {
	l := Layout{Desc: align(at, 32) + 16}
	l.Avail = align(l.Desc+16*uint64(size), 8) + 4
	l.Used = l.Avail + 8
	l.End = l.Used + 4
	return l
}
