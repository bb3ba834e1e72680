package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtqueue"
)

// InflightDesc is the payload of GET_INFLIGHT_FD and SET_INFLIGHT_FD.
type InflightDesc struct {
	Size, Offset      uint64 // of the region in its file, in bytes
	Queues, QueueSize uint16
}

const inflightLen = 24

// Append appends the encoded payload to b.
func (d InflightDesc) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, d.Size)
	b = binary.LittleEndian.AppendUint64(b, d.Offset)
	b = binary.LittleEndian.AppendUint16(b, d.Queues)
	b = binary.LittleEndian.AppendUint16(b, d.QueueSize)
	return append(b, 0, 0, 0, 0)
}

// DecodeInflightDesc decodes the first 20 bytes of b.
func DecodeInflightDesc(b []byte) InflightDesc {
	return InflightDesc{
		Size: binary.LittleEndian.Uint64(b), Offset: binary.LittleEndian.Uint64(b[8:]),
		Queues: binary.LittleEndian.Uint16(b[16:]), QueueSize: binary.LittleEndian.Uint16(b[18:]),
	}
}

// inflight is the region that SET_INFLIGHT_FD shared.
type inflight struct {
	mem    *guestmem.Table // with the region at address 0
	desc   InflightDesc
	packed bool // the layout that its size was judged for
}

// need is how many bytes the queues take; at most 2^16 times 1 MiB and some.
func (d InflightDesc) need(packed bool) uint64 {
	return uint64(d.Queues) * virtqueue.InflightBytes(int(d.QueueSize), packed)
}

func (s *Session) checkInflight(d InflightDesc) error {
	if d.Queues == 0 || int(d.Queues) > len(s.rings) || d.QueueSize == 0 || d.QueueSize > maxRingSize {
		return fmt.Errorf("inflight region of %d queues with %d descriptors, accepted are 1 to %d with 1 to %d", d.Queues, d.QueueSize, len(s.rings), maxRingSize)
	}
	return nil
}

// getInflightFD makes a region, new and empty, and keeps nothing of it: the front-end hands it back with SET_INFLIGHT_FD.
func (s *Session) getInflightFD(m *message) error {
	d := DecodeInflightDesc(m.body)
	if err := s.checkInflight(d); err != nil {
		return err
	}
	d.Size, d.Offset = d.need(s.packed()), 0
	fd, err := unix.MemfdCreate("vhostd-inflight", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	m.replyFD = ownFD(fd)
	if err := unix.Ftruncate(fd, int64(d.Size)); err != nil {
		return fmt.Errorf("inflight region of %d bytes: %w", d.Size, os.NewSyscallError("ftruncate", err))
	}
	// Neither side can shorten the file under the other. Front-ends map and keep it, no more.
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL); err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	m.reply = d.Append(nil)
	return nil
}

// setInflightFD takes a region over: one of GET_INFLIGHT_FD, or what is left of the back-end before.
func (s *Session) setInflightFD(m *message) error {
	d := DecodeInflightDesc(m.body)
	if err := s.checkInflight(d); err != nil {
		return err
	}
	need := d.need(s.packed())
	if d.Size < need || d.Offset%virtioAlign != 0 {
		return fmt.Errorf("inflight region of %d bytes at %#x in its file: %d queues with %d descriptors need %d, at a multiple of %d", d.Size, d.Offset, d.Queues, d.QueueSize, need, virtioAlign)
	}
	for _, r := range s.rings[:d.Queues] {
		if r != nil && r.size > d.QueueSize {
			return fmt.Errorf("inflight region for rings of %d: ring %d has %d descriptors", d.QueueSize, r.index, r.size)
		}
	}
	if err := s.reconfigure(s.rings...); err != nil {
		return err
	}
	t, err := guestmem.NewTable([]guestmem.RegionSpec{{Size: need, MmapOffset: d.Offset}}, []int{m.fds[0].num()})
	if err != nil {
		return fmt.Errorf("inflight region: %w", err)
	}
	s.dropInflight()
	s.inflight = &inflight{mem: t, desc: d, packed: s.packed()}
	return nil
}

// virtioAlign is what the queues' parts of the region are aligned to, and with them the region.
const virtioAlign = 64

// fitsInflight refuses a ring size for which the region has no room.
func (s *Session) fitsInflight(r *ring, num uint32) error {
	if in := s.inflight; in != nil && r.index < int(in.desc.Queues) && num > uint32(in.desc.QueueSize) {
		return fmt.Errorf("ring %d: size %d, the inflight region was made for rings of %d", r.index, num, in.desc.QueueSize)
	}
	return nil
}

// partOf is the ring's part of the region, nil if it has none.
func (s *Session) partOf(r *ring) *virtqueue.Inflight {
	in := s.inflight
	if in == nil {
		return nil
	}
	if r.index >= int(in.desc.Queues) || in.packed != s.packed() {
		s.once.log("inflight", "a ring is not in the inflight region: its chains are not tracked", "ring", r.index,
			"queues", in.desc.Queues, "packed", in.packed)
		return nil
	}
	stride := virtqueue.InflightBytes(int(in.desc.QueueSize), in.packed)
	host, run := in.mem.Lookup(uint64(r.index)*stride, stride)
	if run != stride {
		return nil // cannot be: the region was measured
	}
	return &virtqueue.Inflight{Host: host, Entries: in.desc.QueueSize, Mem: in.mem}
}

// tracked tells what became of a ring's part when the ring started.
func (s *Session) tracked(r *ring, part *virtqueue.Inflight) {
	switch {
	case part == nil:
	case part.Refused != nil:
		s.logger.Warn("inflight region begun anew", "ring", r.index, "reason", part.Refused)
	case part.Resubmitted > 0:
		s.logger.Info("chains of the back-end before are taken again", "ring", r.index, "chains", part.Resubmitted)
	}
}

// endTracking leaves a part of the region that says nothing: the ring has been drained and its position told, and where it
// starts next is the front-end's to say.
func (s *Session) endTracking(r *ring) {
	part := s.partOf(r)
	if part == nil {
		return
	}
	if err := part.Mem.Guard(part.End); err != nil {
		s.once.log("inflight end", "the inflight region is gone", "ring", r.index, "err", err)
	}
}

// dropInflight closes the region. No ring that has a part of it runs.
func (s *Session) dropInflight() {
	if s.inflight == nil {
		return
	}
	s.closeTable(s.inflight.mem)
	s.inflight = nil
}

var errNoSkipDrain = errors.New("the ring is not tracked in an inflight region")

// getVringBaseSkipDrain answers like GET_VRING_BASE and leaves the inflight region as it is, for a front-end that moves the
// requests which it names. A network device completes what it takes before it takes more, so that there is nothing to wait for:
// the position is that of the oldest chain which the region names, if any.
func (s *Session) getVringBaseSkipDrain(m *message) error {
	r, _, err := s.stateOf(m)
	if err != nil {
		return err
	}
	if s.inflight == nil {
		return errNoSkipDrain
	}
	s.stopAt(m, r, s.dropRecord)
	return nil
}
