package hostile

import (
	"encoding/binary"
	"runtime"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// longest is the number of descriptors that a chain may have.
const longest = 1088

// table writes an indirect table of descriptors without bytes, but for the last, and returns its guest address.
func table(t *testing.T, mem *frontend.Memory, gpa uint64, entries int, flags uint16, last uint32) {
	t.Helper()
	target, err := mem.Alloc(0, 65536, 64)
	must(t, err)
	for i := range entries {
		d, next, n := make([]byte, 16), flags|driver.DescFNext, uint32(0)
		if i == entries-1 {
			next, n = flags, last
		}
		binary.LittleEndian.PutUint64(d, target)
		binary.LittleEndian.PutUint32(d[8:], n)
		binary.LittleEndian.PutUint16(d[12:], next)
		binary.LittleEndian.PutUint16(d[14:], uint16(i+1))
		for k := range d { // byte by byte, because the table may cross into another region
			mem.Bytes(gpa+uint64(16*i+k), 1)[0] = d[k]
		}
	}
}

// feed keeps the ring full of the chain with head 0 until stop is closed.
func feed(q *frontend.Queue, stop chan struct{}) {
	idx := q.Ring.PeekUsedIdx()
	for i := range q.Ring.Size() {
		q.Ring.PokeAvail(uint16(i), 0)
	}
	for {
		select {
		case <-stop:
			return
		default:
		}
		if now := q.Ring.PeekUsedIdx() + uint16(q.Ring.Size()); now != idx {
			idx = now
			q.Ring.PokeAvailIdx(idx)
			_ = q.Kick()
		} else {
			time.Sleep(20 * time.Microsecond)
		}
		runtime.Gosched()
	}
}

// testFairness demands that the good guest's frames come back soon while attack runs.
func testFairness(t *testing.T, attack func(t *testing.T, c *frontend.Client, p *frontend.Pair, stop chan struct{})) {
	d := serve(t, false)
	_, good := d.guest("good", frontend.Options{})
	t.Logf("%v alone", worst(t, good, 200*time.Millisecond))
	c, p := d.guest("evil", frontend.Options{RingSize: 1024, TxBuf: 64, RxBuf: 64})
	stop := make(chan struct{})
	attack(t, c, p, stop)
	w := worst(t, good, time.Second)
	close(stop)
	t.Logf("%v under attack", w)
	if w > 200*time.Millisecond { // a machine that is busy with other tests may hold up a frame as well
		t.Errorf("a frame of the good guest took %v", w)
	}
}

// TestChainsOfNothing: chains of very many descriptors without bytes, which no limit on frames or bytes bounds.
func TestChainsOfNothing(t *testing.T) {
	testFairness(t, func(t *testing.T, c *frontend.Client, p *frontend.Pair, stop chan struct{}) {
		at, err := c.Mem.Alloc(0, 16*longest, 16)
		must(t, err)
		table(t, c.Mem, at, longest, 0, 1)
		p.TX.Ring.PokeDesc(0, at, 16*longest, driver.DescFIndirect, 0)
		go feed(p.TX, stop)
	})
}

// TestManyTinyBuffers: a large frame for which very many tiny receive buffers have to be looked at.
func TestManyTinyBuffers(t *testing.T) {
	testFairness(t, func(t *testing.T, c *frontend.Client, p *frontend.Pair, stop chan struct{}) {
		at, err := c.Mem.Alloc(0, 16*longest, 16)
		must(t, err)
		table(t, c.Mem, at, longest, driver.DescFWrite, 13)
		p.RX.Ring.PokeDesc(0, at, 16*longest, driver.DescFIndirect, 0)
		frame, err := c.Mem.Alloc(0, 65000, 64)
		must(t, err)
		p.TX.Ring.PokeDesc(0, frame, 65000, 0, 0)
		// The network's backlog first, so that nothing but the receive side bounds a turn.
		full := make(chan struct{})
		go feed(p.TX, full)
		time.Sleep(time.Second)
		close(full)
		go feed(p.RX, stop)
	})
}
