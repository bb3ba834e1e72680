package vhostuser_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

const testFeatures = virtio.FNetCSum | virtio.FNetGuestCSum | virtio.FNetMrgRxBuf | virtio.FNetCtrlVQ |
	virtio.FNetMQ | virtio.FRingIndirectDesc | virtio.FRingEventIdx | virtio.FVersion1

// fakeDevice records what a session asks for and complains about anything that
// the Device contract excludes.
type fakeDevice struct {
	features virtio.Features
	rings    int
	config   []byte

	refuseFeatures, refuseStart, refuseMemory, refuseMTU, refuseConfig error

	inside  atomic.Int32
	faults  atomic.Pointer[string]
	retries atomic.Int32

	mu        sync.Mutex
	acked     []virtio.Features
	running   map[int]vhostuser.RingConfig
	parked    map[int]bool
	moved     map[int]vhostuser.RingAddrs
	positions map[int]virtqueue.Position
	enabled   map[int]bool
	prepared  *guestmem.Table
	mem       *guestmem.Table
	log       *guestmem.Log
	logFD     int
	logSwaps  int
	swaps     int
	starts    []int
	mtu       uint64
	macs      [][6]byte
	status    []uint8
	connected bool
	resets    int

	stopping func() // runs before a ring is stopped
}

func newDevice(rings int) *fakeDevice {
	return &fakeDevice{
		features: testFeatures, rings: rings,
		logFD: -1, running: map[int]vhostuser.RingConfig{}, parked: map[int]bool{}, moved: map[int]vhostuser.RingAddrs{},
		positions: map[int]virtqueue.Position{}, enabled: map[int]bool{},
	}
}

func (d *fakeDevice) fault(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	d.faults.CompareAndSwap(nil, &s)
}

// enter checks that the session never calls concurrently.
func (d *fakeDevice) enter() func() {
	if !d.inside.CompareAndSwap(0, 1) {
		d.fault("concurrent calls")
	}
	d.mu.Lock()
	return func() { d.mu.Unlock(); d.inside.Store(0) }
}

// peek lets a test read the device's record, or change what it refuses.
func (d *fakeDevice) peek(f func(*fakeDevice)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d)
}

func (d *fakeDevice) isRunning(i int) (running bool) {
	d.peek(func(d *fakeDevice) { _, running = d.running[i] })
	return running
}

func (d *fakeDevice) Features() virtio.Features { return d.features }
func (d *fakeDevice) MaxRings() int             { return d.rings }

// Config may come from any goroutine.
func (d *fakeDevice) Config() []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.config
}

// SetConfig writes what is not refused.
func (d *fakeDevice) SetConfig(offset int, data []byte, migrating bool) error {
	defer d.enter()()
	if d.refuseConfig != nil && !migrating {
		return d.refuseConfig
	}
	d.config = slices.Clone(d.config)
	copy(d.config[offset:], data)
	return nil
}

func (d *fakeDevice) Reset() {
	defer d.enter()()
	if len(d.running) != 0 {
		d.fault("Reset while %d rings run", len(d.running))
	}
	for i, on := range d.enabled {
		if on {
			d.fault("Reset while ring %d is enabled", i)
		}
	}
	d.resets++
}

func (d *fakeDevice) SetFeatures(f virtio.Features) error {
	defer d.enter()()
	if len(d.running) != 0 {
		d.fault("SetFeatures while %d rings run", len(d.running))
	}
	if f.Any(virtio.FVhostUserProtocolFeatures | virtio.FVhostLogAll) {
		d.fault("SetFeatures with bit 30 or 26")
	}
	if d.refuseFeatures != nil {
		return d.refuseFeatures
	}
	d.acked = append(d.acked, f)
	return nil
}

// PrepareMemory demands to come before any ring is led into the table.
func (d *fakeDevice) PrepareMemory(t *guestmem.Table) {
	defer d.enter()()
	d.prepared = t
	for i, c := range d.running {
		for _, r := range t.Regions() {
			if c.Via == nil {
				continue
			}
			if m, outcome := c.Via.Translate(r.GPA, false); outcome == guestmem.Mapped && t.Owns(m.Host) && !d.mem.Owns(m.Host) {
				d.fault("ring %d was led into a table before PrepareMemory", i)
			}
		}
	}
}

func (d *fakeDevice) SetMemory(t *guestmem.Table, live []vhostuser.RingAddrs) error {
	defer d.enter()()
	if t != nil && t != d.mem && t != d.prepared {
		d.fault("SetMemory without PrepareMemory")
	}
	if len(live) != len(d.running) && t != d.mem {
		d.fault("SetMemory names %d rings, %d run", len(live), len(d.running))
	}
	if d.refuseMemory != nil && t != nil {
		return d.refuseMemory
	}
	for _, a := range live {
		if _, ok := d.running[a.Index]; !ok {
			d.fault("SetMemory names ring %d, which does not run", a.Index)
		}
		if a.OK && !(t.Owns(a.Desc) && t.Owns(a.Avail) && t.Owns(a.Used)) {
			d.fault("SetMemory: ring %d outside the table", a.Index)
		}
		d.parked[a.Index], d.moved[a.Index] = !a.OK, a
	}
	d.mem = t
	d.swaps++
	return nil
}

func (d *fakeDevice) StartRing(c vhostuser.RingConfig) error {
	defer d.enter()()
	if d.refuseStart != nil {
		return d.refuseStart
	}
	if _, ok := d.running[c.Index]; ok {
		d.fault("ring %d started twice", c.Index)
	}
	if c.Mem != d.mem || !c.Mem.Owns(c.Desc) || !c.Mem.Owns(c.Avail) || !c.Mem.Owns(c.Used) {
		d.fault("ring %d outside the table", c.Index)
	}
	if c.Desc%16 != 0 || c.Avail%2 != 0 || c.Used%4 != 0 {
		d.fault("ring %d misaligned", c.Index)
	}
	if c.Features != d.acked[len(d.acked)-1] {
		d.fault("ring %d started with features %v", c.Index, c.Features)
	}
	if !fdOpen(c.KickFD) || c.CallFD >= 0 && !fdOpen(c.CallFD) || c.ErrFD >= 0 && !fdOpen(c.ErrFD) {
		d.fault("ring %d started with closed descriptors", c.Index)
	}
	d.running[c.Index] = c
	d.starts = append(d.starts, c.Index)
	d.enabled[c.Index] = c.Enabled
	if _, ok := d.positions[c.Index]; !ok {
		d.positions[c.Index] = c.Base
	}
	return nil
}

func (d *fakeDevice) StopRing(i int) (virtqueue.Position, error) {
	defer d.enter()()
	if d.stopping != nil {
		d.stopping()
	}
	c, ok := d.running[i]
	if !ok {
		d.fault("StopRing of ring %d, which does not run", i)
		return 0, errors.New("not running")
	}
	d.checkFDs(c)
	delete(d.running, i)
	delete(d.parked, i)
	base := d.positions[i]
	delete(d.positions, i)
	return base, nil
}

// checkFDs verifies that what the device was given is still open.
func (d *fakeDevice) checkFDs(c vhostuser.RingConfig) {
	for _, fd := range []int{c.KickFD, c.CallFD, c.ErrFD} {
		if fd >= 0 && !fdOpen(fd) {
			d.fault("ring %d: descriptor %d was closed while in use", c.Index, fd)
		}
	}
}

func fdOpen(fd int) bool {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	return err == nil
}

func (d *fakeDevice) EnableRing(i int, on bool) {
	defer d.enter()()
	if i < 0 || i >= vhostuser.RingLimit(d.rings) {
		d.fault("EnableRing of ring %d", i)
	}
	d.enabled[i] = on
}

func (d *fakeDevice) setFD(i, fd int, field func(*vhostuser.RingConfig) *int) {
	defer d.enter()()
	c, ok := d.running[i]
	if !ok {
		d.fault("descriptor of ring %d, which does not run, changed", i)
		return
	}
	d.checkFDs(c)
	*field(&c) = fd
	d.checkFDs(c)
	d.running[i] = c
}

func (d *fakeDevice) SetKick(i, fd int) {
	d.setFD(i, fd, func(c *vhostuser.RingConfig) *int { return &c.KickFD })
}

func (d *fakeDevice) SetCall(i, fd int) {
	d.setFD(i, fd, func(c *vhostuser.RingConfig) *int { return &c.CallFD })
}

func (d *fakeDevice) SetErr(i, fd int) {
	d.setFD(i, fd, func(c *vhostuser.RingConfig) *int { return &c.ErrFD })
}

func (d *fakeDevice) SetLog(l *guestmem.Log, fd int) {
	defer d.enter()()
	if d.logFD >= 0 && !fdOpen(d.logFD) {
		d.fault("the log's descriptor was closed while in use")
	}
	d.log.Mark(0, 1) // faults if the log was unmapped while in use
	d.log, d.logFD = l, fd
	d.logSwaps++
}

func (d *fakeDevice) SetRingLog(i int, l vhostuser.RingLog) {
	defer d.enter()()
	c, ok := d.running[i]
	if !ok {
		d.fault("log of ring %d, which does not run, changed", i)
		return
	}
	c.Log = l
	d.running[i] = c
}

func (d *fakeDevice) SetMTU(mtu uint64) error {
	defer d.enter()()
	if d.refuseMTU != nil {
		return d.refuseMTU
	}
	d.mtu = mtu
	return nil
}

func (d *fakeDevice) SendRARP(mac [6]byte) error {
	defer d.enter()()
	d.macs = append(d.macs, mac)
	return nil
}

// Retry may come from any goroutine.
func (d *fakeDevice) Retry() { d.retries.Add(1) }

func (d *fakeDevice) SetStatus(s uint8) {
	defer d.enter()()
	d.status = append(d.status, s)
}

func (d *fakeDevice) Connected(string) {
	defer d.enter()()
	if d.connected {
		d.fault("connected twice")
	}
	d.connected = true
}

func (d *fakeDevice) Disconnected() {
	defer d.enter()()
	if d.log != nil || d.logFD >= 0 {
		d.fault("disconnected with a dirty log")
	}
	if !d.connected || len(d.running) != 0 || d.mem != nil {
		d.fault("disconnected with %d rings running, memory %v", len(d.running), d.mem != nil)
	}
	d.connected = false
}
