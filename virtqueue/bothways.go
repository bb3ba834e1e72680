package virtqueue

// misdirected judges the flags of a buffer that do not match what is wanted: in a
// ring of chains with both directions that is each one, and wrong is a readable
// buffer behind a writable one.
func (t *translator) misdirected(b *Batch, flags uint16) bool {
	switch {
	case t.want != bothWays:
		return true
	case flags&descFWrite == 0:
		return t.readable >= 0
	case t.readable < 0:
		t.readable = b.NSegs
	}
	return false
}

// readableSegs is Chain.Readable of the chain gathered last, whose segments begin
// at first and end the batch.
func (t *translator) readableSegs(b *Batch, first int) uint16 {
	if t.readable < 0 {
		return uint16(b.NSegs - first)
	}
	return uint16(max(min(t.readable, b.NSegs)-first, 0))
}
