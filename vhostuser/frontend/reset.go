package frontend

// Reset makes the ring, which is stopped, that of a new driver: zeroed, with all
// slots free.
func (q *Queue) Reset() {
	if q.Ring != nil {
		q.Driver.Reset(0)
		q.position = 0
	} else {
		q.Driver.Reset(freshPacked & 0xffff)
		q.position = freshPacked
	}
	q.free = q.free[:0]
	for i := range q.slots {
		q.free = append(q.free, i)
	}
}

// Reset resets both rings.
func (p *Pair) Reset() {
	p.RX.Reset()
	p.TX.Reset()
}
