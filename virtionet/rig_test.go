package virtionet

import (
	"log/slog"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
	"github.com/vhostd/vhostd/worker"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:"), testmain.Goroutines()))
}

const baseFeatures = virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FRingIndirectDesc

// rig is a device with one started pair and the driver's side of its rings, without
// a socket in between.
type rig struct {
	t       testing.TB
	o       rigOptions
	mem     *frontend.Memory
	table   *guestmem.Table
	arena   *pagemem.Arena
	loop    *worker.Loop
	shared  bool // loop and arena are another rig's
	dev     *Device
	rings   [2]driver.Queue
	rx, tx  driver.Queue
	at      [2]uint64 // guest addresses of the rings
	bufs    uint64    // guest address of buffer 0
	next    uint64    // where place puts the next bytes, from bufs
	calls   [2]int    // call eventfds by ring
	kicks   [2]int
	errs    [2]int
	fatal   chan error
	bases   [2]virtqueue.Position // where the rings resume
	logs    [2]vhostuser.RingLog
	running [2]bool
	closed  bool
}

const (
	rigRing   = 256
	rigBuf    = 4096
	rigSlots  = 1024
	rigSeam   = 8 << 20 // guest address at which one region ends and the next begins
	rigRegion = 1 << 20
)

type rigOptions struct {
	features virtio.Features
	wake     worker.Wake
	lag      int
	size     int
	arena    uint64 // bytes
	beside   *rig   // share its worker and arena
	copy     CopyPolicy
	alloc    TxAlloc
	pairs    int // offered, default 1
	pair     int // the one that is used
	via      *pager
}

func newRig(t testing.TB, p port.Port, o rigOptions) *rig {
	t.Helper()
	if o.size == 0 {
		o.size = rigRing
	}
	if o.arena == 0 {
		o.arena = 64 << 20
	}
	r := &rig{t: t, o: o, fatal: make(chan error, 8)}
	r.mem = must(frontend.NewMemory(rigSeam))
	must(r.mem.Add(guestmem.RegionSpec{GPA: rigSeam, Size: rigRegion, UVA: 0x7f00_0000_0000}))
	r.table = r.newTable()
	if o.via != nil {
		o.via.table = r.table
	}
	if o.beside != nil {
		r.shared, r.arena, r.loop = true, o.beside.arena, o.beside.loop
	} else {
		r.arena = must(pagemem.NewArena(pagemem.Config{Bytes: o.arena, Name: "test"}))
		r.loop = must(worker.New(worker.Options{Name: t.Name(), CPU: -1, Wake: o.wake, Spin: 100 * time.Microsecond}))
	}
	r.dev = must(New(Options{
		Name: "g", Port: p, Arena: r.arena, Workers: []*worker.Loop{r.loop}, QueuePairs: max(o.pairs, 1),
		TxLag: o.lag, Copy: o.copy, TxAlloc: o.alloc,
		Logger: slog.New(slog.DiscardHandler), OnFatal: func(err error) { r.fatal <- err },
	}))
	r.dev.Connected("test")
	if err := r.dev.SetFeatures(o.features); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		r.addRing(i)
		r.reset(i)
		r.start(i)
		r.rings[i].DisableCalls()
	}
	r.rx, r.tx = r.rings[0], r.rings[1]
	r.bufs = must(r.mem.Alloc(0, rigSlots*rigBuf, rigBuf))
	t.Cleanup(r.close)
	return r
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (r *rig) newTable() *guestmem.Table {
	specs, fds := r.mem.Table()
	return must(guestmem.NewTable(specs, fds))
}

func (r *rig) layout() driver.Layout {
	if r.packed() {
		return driver.PackedFormat(r.o.size, 0)
	}
	return driver.Packed(r.o.size, 0)
}

// addRing makes the driver's side of ring i and its eventfds.
func (r *rig) addRing(i int) {
	l := r.layout()
	r.at[i] = must(r.mem.Alloc(0, l.End, 64))
	host := r.mem.Host(r.at[i])
	cfg := driver.Config{
		Size: r.o.size, Desc: host + uintptr(l.Desc), Avail: host + uintptr(l.Avail), Used: host + uintptr(l.Used),
		Features: r.o.features,
	}
	if r.packed() {
		r.rings[i] = must(driver.NewPacked(cfg))
	} else {
		r.rings[i] = must(driver.New(cfg))
	}
	for _, fd := range []*int{&r.kicks[i], &r.calls[i], &r.errs[i]} {
		*fd = must(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK))
	}
}

// addrs are the addresses of ring i in table t.
func (r *rig) addrs(t *guestmem.Table, i int) vhostuser.RingAddrs {
	l := r.layout()
	translate := func(off uint64) uintptr {
		h, run := t.Lookup(r.at[i]+off, 1)
		if run == 0 {
			r.t.Fatal("ring outside memory")
		}
		return h
	}
	return vhostuser.RingAddrs{Index: r.index(i), Desc: translate(l.Desc), Avail: translate(l.Avail), Used: translate(l.Used), OK: true, Log: r.logs[i]}
}

func (r *rig) config(i int) vhostuser.RingConfig {
	a := r.addrs(r.table, i)
	cfg := vhostuser.RingConfig{
		Base: r.bases[i], Index: r.index(i), Size: uint16(r.o.size), Desc: a.Desc, Avail: a.Avail, Used: a.Used,
		KickFD: r.kicks[i], CallFD: r.calls[i], ErrFD: r.errs[i], Features: r.o.features, Mem: r.table, Enabled: true, Log: r.logs[i],
	}
	if r.o.via != nil {
		cfg.Via = r.o.via
	}
	return cfg
}

func (r *rig) start(i int) {
	r.t.Helper()
	if err := r.dev.StartRing(r.config(i)); err != nil {
		r.t.Fatal(err)
	}
	r.running[i] = true
	r.loop.Do(func() {}) // the turn that the start caused is over
}

func (r *rig) stop(i int) virtqueue.Position {
	r.t.Helper()
	base, err := r.dev.StopRing(r.index(i))
	if err != nil {
		r.t.Error(err)
	}
	r.running[i], r.bases[i] = false, base
	return base
}

func (r *rig) disconnect() {
	for i := range 2 {
		if r.running[i] {
			r.stop(i)
		}
	}
	if err := r.dev.SetMemory(nil, nil); err != nil {
		r.t.Error(err)
	}
	r.dev.Disconnected()
}

func (r *rig) close() {
	if r.closed {
		return
	}
	r.closed = true
	r.disconnect()
	closers := []interface{ Close() error }{r.dev, r.dev.opts.Port, r.table, r.mem}
	if !r.shared {
		closers = append(closers, r.loop)
	}
	for _, c := range closers {
		if err := c.Close(); err != nil {
			r.t.Error(err)
		}
	}
	if !r.shared {
		if n := r.arena.InUse(); n != 0 {
			r.t.Errorf("%d pages of the arena are still in use", n)
		}
		if n := r.arena.Stats().Misuse; n != 0 {
			r.t.Errorf("%d references dropped that nobody held", n)
		}
		if err := r.arena.Close(); err != nil {
			r.t.Error(err)
		}
	}
	for i := range 2 {
		for _, fd := range []int{r.kicks[i], r.calls[i], r.errs[i]} {
			unix.Close(fd)
		}
	}
}

// finishEarly ends a rig of which one test makes many.
func (r *rig) finishEarly() {
	if !r.t.Failed() {
		r.close()
	}
}

func (r *rig) pair() *pair { return r.dev.pairs[r.o.pair] }

// index is the device's number of the pair's receiveq (0) or transmitq (1).
func (r *rig) index(i int) int { return 2*r.o.pair + i }

// run lets the pair work on its own thread until it finds nothing more to do. The
// worker does not arm in between.
func (r *rig) run() {
	r.untilAnswered(func() {
		for r.pair().Run() {
		}
	})
}

// buf is buffer i of the rig.
func (r *rig) buf(i int, n uint32, write bool) driver.Buf {
	return driver.Buf{Addr: r.bufs + uint64(i)*rigBuf, Len: n, Write: write}
}

// lap posts n tx frames and n rx buffers, runs the pair once on the worker's thread
// and takes back what was used.
func (r *rig) lap(p *pair, n int, frame uint32) (txUsed, rxUsed int) {
	for i := range n {
		if r.tx.Free() > 0 {
			_, _ = r.tx.AddDirect(r.buf(i, 12+frame, false))
		}
		if r.rx.Free() > 0 {
			_, _ = r.rx.AddDirect(r.buf(512+i, rigBuf, true))
		}
	}
	r.tx.Publish()
	r.rx.Publish()
	p.Run()
	for {
		if _, _, ok := r.tx.GetUsed(); !ok {
			break
		}
		txUsed++
	}
	for {
		if _, _, ok := r.rx.GetUsed(); !ok {
			break
		}
		rxUsed++
	}
	return txUsed, rxUsed
}
