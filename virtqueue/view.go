package virtqueue

// Consumed is the position of the oldest chain that was not completed, as it is known
// without touching the ring's memory.
func (q *Split) Consumed() Position { return Position(q.consumed) }

// MoreAvailable reports whether there are chains that Fill has never delivered.
func (q *Split) MoreAvailable() bool { return q.ring.availIdx() != q.seen }

// AvailSeen is the driver's available index as last read.
func (q *Split) AvailSeen() uint16 { return q.available }
