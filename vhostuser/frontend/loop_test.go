package frontend_test

import (
	"encoding/binary"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// loopDevice sends every frame back on the pair it came from, as slowly and
// simply as possible: one goroutine, one lock.
type loopDevice struct {
	pairs    int
	features virtio.Features
	mute     bool // never calls the driver

	mu      sync.Mutex
	mem     *guestmem.Table
	rings   map[int]*loopRing
	backlog map[int][][]byte // frames with header, by pair
	stop    chan struct{}
	done    sync.WaitGroup
}

type loopRing struct {
	cfg vhostuser.RingConfig
	q   virtqueue.Ring
}

func newLoop(pairs int) *loopDevice {
	return &loopDevice{
		pairs: pairs, rings: map[int]*loopRing{}, backlog: map[int][][]byte{},
		features: virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FNetMQ | virtio.FRingIndirectDesc | virtio.FRingEventIdx,
	}
}

func (d *loopDevice) run() {
	defer d.done.Done()
	var batch virtqueue.Batch
	for {
		select {
		case <-d.stop:
			return
		case <-time.After(200 * time.Microsecond):
		}
		d.mu.Lock()
		for i := range d.pairs {
			d.transmit(&batch, i)
			d.receive(&batch, i)
		}
		d.mu.Unlock()
	}
}

func (d *loopDevice) transmit(batch *virtqueue.Batch, pair int) {
	r := d.rings[2*pair+1]
	if r == nil || len(d.backlog[pair]) > 256 {
		return
	}
	batch.Reset()
	if _, err := r.q.Fill(batch, virtqueue.MaxBatch); err != nil {
		panic(err)
	}
	for i := range batch.N {
		var frame []byte
		for _, s := range batch.ChainSegs(i) {
			frame = append(frame, view(s.Host, s.Len)...)
		}
		d.backlog[pair] = append(d.backlog[pair], frame)
		r.q.Complete(batch.Chains[i].Head, 0)
	}
	d.finish(r)
}

func (d *loopDevice) receive(batch *virtqueue.Batch, pair int) {
	r := d.rings[2*pair]
	for r != nil && len(d.backlog[pair]) > 0 {
		frame := d.backlog[pair][0]
		batch.Reset()
		n, err := r.q.Fill(batch, virtqueue.MaxBatch)
		if err != nil {
			panic(err)
		}
		used := fit(batch, len(frame))
		if used == 0 {
			r.q.Unfill(n)
			break
		}
		r.q.Unfill(n - used)
		binary.LittleEndian.PutUint16(frame[10:], uint16(used))
		for i := range used {
			written := scatter(batch.ChainSegs(i), &frame)
			r.q.Complete(batch.Chains[i].Head, written)
		}
		d.backlog[pair] = d.backlog[pair][1:]
	}
	if r != nil {
		d.finish(r)
	}
}

// fit is how many chains a frame takes, 0 if there are too few.
func fit(batch *virtqueue.Batch, n int) int {
	for i := range batch.N {
		if n -= int(batch.Chains[i].Len); n <= 0 {
			return i + 1
		}
	}
	return 0
}

func scatter(segs []virtqueue.Seg, frame *[]byte) (written uint32) {
	for _, s := range segs {
		n := copy(view(s.Host, s.Len), *frame)
		*frame = (*frame)[n:]
		written += uint32(n)
	}
	return written
}

func (d *loopDevice) finish(r *loopRing) {
	if r.q.Publish(0) > 0 && r.q.NeedsCall() && !d.mute && r.cfg.CallFD >= 0 {
		_, _ = unix.Write(r.cfg.CallFD, binary.NativeEndian.AppendUint64(nil, 1))
	}
	r.q.EnableKicks()
}

func (d *loopDevice) locked() func() {
	d.mu.Lock()
	return d.mu.Unlock
}

func (d *loopDevice) Features() virtio.Features         { return d.features }
func (d *loopDevice) Reset()                            {}
func (d *loopDevice) SetConfig(int, []byte, bool) error { return errors.ErrUnsupported }
func (d *loopDevice) MaxRings() int                     { return 2 * d.pairs }
func (d *loopDevice) Config() []byte                    { return nil }
func (d *loopDevice) SetFeatures(virtio.Features) error { return nil }
func (d *loopDevice) EnableRing(int, bool)              {}
func (d *loopDevice) SetKick(int, int)                  {}
func (d *loopDevice) SetErr(int, int)                   {}
func (d *loopDevice) SetMTU(uint64) error               { return nil }
func (d *loopDevice) SendRARP([6]byte) error            { return nil }
func (d *loopDevice) SetStatus(uint8)                   {}
func (d *loopDevice) Retry()                            {}
func (d *loopDevice) SetLog(*guestmem.Log, int)         {}
func (d *loopDevice) SetRingLog(int, vhostuser.RingLog) {}

func (d *loopDevice) PrepareMemory(*guestmem.Table) {}

func (d *loopDevice) SetMemory(t *guestmem.Table, live []vhostuser.RingAddrs) error {
	defer d.locked()()
	d.mem = t
	for _, a := range live {
		d.rings[a.Index].q.SetMemory(t, a.Desc, a.Avail, a.Used)
	}
	return nil
}

func (d *loopDevice) StartRing(c vhostuser.RingConfig) error {
	defer d.locked()()
	q, err := virtqueue.New(virtqueue.Config{
		Size: c.Size, Desc: c.Desc, Avail: c.Avail, Used: c.Used, Features: c.Features,
		Base: c.Base, Mem: c.Mem, DeviceWrites: c.Index%2 == 0,
	})
	if err != nil {
		return err
	}
	d.rings[c.Index] = &loopRing{cfg: c, q: q}
	return nil
}

func (d *loopDevice) StopRing(i int) (virtqueue.Position, error) {
	defer d.locked()()
	r := d.rings[i]
	delete(d.rings, i)
	return r.q.Position(), nil
}

func (d *loopDevice) SetCall(i, fd int) {
	defer d.locked()()
	d.rings[i].cfg.CallFD = fd
	if fd >= 0 {
		_, _ = unix.Write(fd, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // a call may have been due before there was a descriptor
	}
}

func (d *loopDevice) Connected(string) {
	d.stop = make(chan struct{})
	d.done.Add(1)
	go d.run()
}

func (d *loopDevice) Disconnected() {
	close(d.stop)
	d.done.Wait()
}
