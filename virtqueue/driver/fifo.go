package driver

// fifo is a queue of at most as many ids as the ring has descriptors.
type fifo struct {
	ids     []uint16
	head, n int
}

func newFIFO(size int) fifo { return fifo{ids: make([]uint16, size)} }

func (f *fifo) reset() { f.head, f.n = 0, 0 }

func (f *fifo) push(id uint16) {
	tail := f.head + f.n
	if tail >= len(f.ids) {
		tail -= len(f.ids)
	}
	f.ids[tail] = id
	f.n++
}

func (f *fifo) pop() uint16 {
	id := f.ids[f.head]
	if f.head++; f.head == len(f.ids) {
		f.head = 0
	}
	f.n--
	return id
}
