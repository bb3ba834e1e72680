package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
)

// sessionFeatures are bits between front-end and session that no device sees.
const sessionFeatures = virtio.FVhostUserProtocolFeatures | virtio.FVhostLogAll

// DirtyLog is the payload of SET_LOG_BASE and of its reply: the size of the bitmap
// in bytes and where it begins in its file.
type DirtyLog struct{ Size, Offset uint64 }

const dirtyLogLen = 16

// Append appends the encoded payload to b.
func (l DirtyLog) Append(b []byte) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(b, l.Size), l.Offset)
}

// setLogBase replaces the dirty log, also under running rings: cloud-hypervisor
// brings a new one for every pass over the memory. The reply, which is the payload
// again (cloud-hypervisor waits for 16 bytes, QEMU takes any number), tells that
// nobody writes to the log before it any more. A refused log leaves that in use.
func (s *Session) setLogBase(m *message) error {
	want := DirtyLog{binary.LittleEndian.Uint64(m.body), binary.LittleEndian.Uint64(m.body[8:])}
	l, err := guestmem.NewLog(want.Size, want.Offset, m.fds[0].num())
	if err == nil && s.unlogged {
		if err = l.MarkAll(s.mem); err != nil {
			err = errors.Join(err, l.Close())
		}
	}
	if s.logRefused = err != nil; err != nil {
		return err
	}
	old := s.log
	s.log, s.unlogged = l, false
	s.applyLog()
	s.closeLog(old)
	m.reply = want.Append(nil)
	return nil
}

// setLogFD takes the eventfd that tells the front-end of marks.
func (s *Session) setLogFD(m *message) error {
	if err := m.fds[0].notifies(); err != nil {
		return err
	}
	old := s.logFD
	s.logFD = m.fds[0].take()
	s.applyLog()
	old.close()
	return nil
}

// logging reports whether marks were asked for.
func (s *Session) logging() bool { return s.acked.Has(virtio.FVhostLogAll) }

// logAcceptable refuses to begin logging after the log was refused: QEMU takes any
// reply to SET_LOG_BASE for success, and would move a guest without our pages.
func (s *Session) logAcceptable(want virtio.Features) error {
	if s.logRefused && want.Has(virtio.FVhostLogAll) && !s.logging() {
		return errors.New("LOG_ALL needs a dirty log, and that of the last SET_LOG_BASE was refused")
	}
	return nil
}

// followLogging tells the device after LOG_ALL may have changed.
func (s *Session) followLogging() {
	switch {
	case !s.logging():
		s.unlogged = false
	case s.log == nil:
		s.unlogged = true
	}
	s.applyLog()
}

func (s *Session) applyLog() {
	l := s.log
	if !s.logging() {
		l = nil
	}
	s.dev.SetLog(l, s.logFD.num())
}

// startedLogging remembers that a ring began to run while LOG_ALL was set. QEMU
// starts rings of a guest that reboots in the middle of a migration before it
// brings the log, and the one before may be read by nobody: the next log gets all
// pages.
func (s *Session) startedLogging() { s.unlogged = s.unlogged || s.logging() }

func (s *Session) closeLog(l *guestmem.Log) {
	if n := l.Beyond(); n > 0 {
		s.once.log("dirty log too small", "pages were written that the dirty log has no bit for", "pages", n)
	}
	if err := l.Close(); err != nil {
		s.logger.Error("dirty log was not unmapped", "peer", s.peer, "err", err)
	}
}

// releaseLog takes the log from the device and closes it.
func (s *Session) releaseLog() {
	s.dev.SetLog(nil, -1)
	s.closeLog(s.log)
	s.log = nil
	s.logFD.close()
}

// maxUsedBytes is the largest used ring.
const maxUsedBytes = 6 + 8*maxRingSize

// checkLogAddr refuses an address whose ring would go beyond 64 bits.
func checkLogAddr(a VringAddr) error {
	if a.Flags&vringAddrFLog != 0 && a.Log > math.MaxUint64-maxUsedBytes {
		return fmt.Errorf("ring %d: log address %#x leaves no room for a used ring below 64 bits", a.Index, a.Log)
	}
	return nil
}

// ringLog says at which guest addresses writes to the ring itself are marked. Behind an
// IOMMU the log address is an IOVA; QEMU gives that of the used ring, so one that is not
// translated stands for where the used ring lies. The descriptor ring, which has no log
// address, is marked where it lies.
func (s *Session) ringLog(r *ring, t *guestmem.Table, at RingAddrs) RingLog {
	l := RingLog{On: r.addr.Flags&vringAddrFLog != 0, Used: r.addr.Log}
	if l.On && s.iotlb != nil {
		var ok bool
		if l.Used, ok = s.iotlb.GPA(r.addr.Log); !ok {
			l.Used, _ = t.GPA(at.Used, 1)
		}
	}
	if s.packed() {
		l.Desc, _ = t.GPA(at.Desc, 1)
	}
	return l
}

// relog follows SET_VRING_ADDR of a running ring. One whose memory left the table
// is told with the table that holds it.
func (s *Session) relog(r *ring) {
	if at, err := s.locate(r, s.mem); err == nil {
		s.dev.SetRingLog(r.index, at.Log)
	}
}
