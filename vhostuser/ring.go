package vhostuser

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// Alignment of the three areas of a ring (virtio 1.3, 2.7 and 2.8).
const (
	descAlign   = 16
	availAlign  = 2
	usedAlign   = 4
	packedAlign = 4 // of both event suppression structures
)

// ring is what the front-end said about one ring. started and enabled are
// independent (vhost-user.rst, "Ring states").
type ring struct {
	index            int
	size             uint16    // 0: not set
	addr             VringAddr // translated anew at every use
	hasAddr          bool
	base             uint32 // as SET_VRING_BASE says it
	hasBase          bool
	kick, call, err  fd
	started, enabled bool
	control          bool      // it was started as the control queue
	at               RingAddrs // of a started ring, where the device has it
}

func (r *ring) closeFDs() {
	r.kick.close()
	r.call.close()
	r.err.close()
}

func (r *ring) state() RingState {
	return RingState{
		Index: r.index, Control: r.started && r.control, Size: int(r.size), Started: r.started, Enabled: r.enabled, Base: r.base,
		HasKick: r.kick.ok(), HasCall: r.call.ok(), HasErr: r.err.ok(),
	}
}

// area is one of the three pieces of memory that make up a ring.
type area struct {
	name        string
	addr, bytes uint64
	align       uintptr
	write       bool // by the device
}

func (s *Session) areas(r *ring) [3]area {
	desc, avail, used := virtqueue.RingBytes(int(r.size), s.packed())
	align := uintptr(availAlign)
	if s.packed() {
		align = packedAlign
	}
	return [...]area{
		{"descriptor table", r.addr.Desc, desc, descAlign, s.packed()},
		{"available ring", r.addr.Avail, avail, align, false},
		{"used ring", r.addr.Used, used, usedAlign, true},
	}
}

// locate translates the ring's areas, each of which must lie in one region of t.
func (s *Session) locate(r *ring, t *guestmem.Table) (RingAddrs, error) {
	var hosts [3]uintptr
	for i, a := range s.areas(r) {
		host, err := s.ringAddress(t, a.addr, a.bytes, a.write)
		if err != nil {
			return RingAddrs{Index: r.index}, fmt.Errorf("ring %d: %s at %s %#x (%d bytes) %w", r.index, a.name, s.addressKind(), a.addr, a.bytes, err)
		}
		if host%a.align != 0 {
			return RingAddrs{Index: r.index}, fmt.Errorf("ring %d: %s at %s %#x is not aligned to %d in its region", r.index, a.name, s.addressKind(), a.addr, a.align)
		}
		hosts[i] = host
	}
	a := RingAddrs{Index: r.index, Desc: hosts[0], Avail: hosts[1], Used: hosts[2], OK: true}
	a.Log = s.ringLog(r, t, a)
	return a, nil
}

// relocateOne finds a started ring anew in t. A ring that is not there is parked by
// the device until it is found; the log says so unless the front-end was asked.
func (s *Session) relocateOne(r *ring, t *guestmem.Table) {
	var err error
	r.at, err = s.locate(r, t)
	if err != nil && !errors.Is(err, errUntranslated) {
		s.once.log("ring parked", "a running ring waits until its memory returns", "err", err)
	}
}

// ring returns the ring for a full-width index from the wire, created on first use.
func (s *Session) ring(index uint32) (*ring, error) {
	if uint64(index) >= uint64(len(s.rings)) {
		return nil, fmt.Errorf("ring index %d is out of range, 0 to %d are accepted", index, len(s.rings)-1)
	}
	r := s.rings[index]
	if r == nil {
		r = &ring{index: int(index), enabled: s.enabledByDefault}
		s.rings[index] = r
	}
	return r, nil
}

// packed reports whether rings have the packed format.
func (s *Session) packed() bool { return s.acked.Has(virtio.FRingPacked) }

// position is where the ring is to start: what the front-end said, or the
// beginning.
func (s *Session) position(r *ring) (virtqueue.Position, error) {
	if s.packed() && !r.hasBase {
		return virtqueue.FreshPacked, nil
	}
	return virtqueue.ParsePosition(r.base, r.size, s.packed())
}

// mayStart applies the rule of the package documentation about the rings that may
// run under the acknowledged features.
func (s *Session) mayStart(index int) bool {
	control := controlIndex(s.dev.MaxRings(), s.acked)
	switch {
	case index == control:
		return true
	case !s.acked.Has(virtio.FNetMQ):
		return index < 2
	}
	return control < 0 || index < control
}

// start starts a ring for which everything is there; otherwise it waits, which is
// no error. On error the ring is as before.
func (s *Session) start(r *ring) error {
	complete := s.featuresSet && s.mem.Len() > 0 && r.size != 0 && r.hasAddr && r.kick.ok()
	if r.started || !complete || !s.mayStart(r.index) {
		return nil
	}
	a, err := s.locate(r, s.mem)
	if errors.Is(err, errUntranslated) {
		return nil
	}
	if err != nil {
		return err
	}
	base, err := s.position(r)
	if err != nil {
		return fmt.Errorf("ring %d: %w", r.index, err)
	}
	control := r.index == controlIndex(s.dev.MaxRings(), s.acked)
	var rec *virtqueue.Record
	var part *virtqueue.Inflight
	if !control { // which has no frames to lose
		rec, part = s.record(r, a), s.partOf(r)
	}
	err = s.dev.StartRing(RingConfig{
		Index: r.index, Size: r.size, Desc: a.Desc, Avail: a.Avail, Used: a.Used, Base: base,
		KickFD: r.kick.num(), CallFD: r.call.num(), ErrFD: r.err.num(),
		Features: s.acked &^ sessionFeatures, Mem: s.mem, Via: s.via(), Enabled: r.enabled,
		Control: control, Log: a.Log,
		Record: rec, Inflight: part,
	})
	if err != nil {
		return fmt.Errorf("ring %d: %w", r.index, err)
	}
	r.started, r.control, r.at = true, control, a
	s.resumed(r, rec)
	s.tracked(r, part)
	s.startedLogging()
	return nil
}

// startReady starts the rings that waited for what has just come. The message
// that brought it is right even if such a ring turns out to be unusable.
func (s *Session) startReady() {
	for _, r := range s.rings {
		if r == nil {
			continue
		}
		if err := s.start(r); err != nil {
			s.once.log("ring not started", "a configured ring cannot start", "err", err)
		}
	}
}

// stop stops a ring if it runs and forgets its kick descriptor, so that only a new
// SET_VRING_KICK starts it again. Call and err stay: DPDK virtio-user sends the
// call descriptor once per connection.
func (s *Session) stop(r *ring) {
	if r.started {
		base, err := s.dev.StopRing(r.index)
		if err != nil {
			s.once.log("ring stop", "device reports an error on stopping a ring", "ring", r.index, "err", err)
		}
		r.started, r.base, r.hasBase = false, uint32(base), true
	}
	r.kick.close()
}

// reconfigure makes rings ready for another size, base, address or feature set. A
// running ring refuses, and then nothing changes; a started but disabled one is
// stopped, because libkrun resets a device with SET_VRING_ENABLE 0 alone.
func (s *Session) reconfigure(rings ...*ring) error {
	for _, r := range rings {
		if r != nil && r.started && r.enabled {
			return fmt.Errorf("ring %d is running; GET_VRING_BASE stops it", r.index)
		}
	}
	for _, r := range rings {
		if r != nil && r.started {
			s.stop(r)
			s.dropRecord(r)
			s.endTracking(r)
		}
	}
	return nil
}

func (s *Session) enable(r *ring, on bool) {
	if r.enabled == on {
		return
	}
	r.enabled = on
	s.dev.EnableRing(r.index, on)
}
