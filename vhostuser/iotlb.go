package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
)

// IOTLBMsg is the payload of IOTLB_MSG in both directions (vhost-user.rst,
// "An IOTLB message").
type IOTLBMsg struct {
	IOVA, Size, UVA uint64
	Perm, Type      uint8
}

// Types of an IOTLBMsg. The back-end sends a miss, the front-end the others.
const (
	IOTLBMiss       = 1
	IOTLBUpdate     = 2
	IOTLBInvalidate = 3
)

const iotlbLen = 32

// Append appends the encoded payload to b.
func (v IOTLBMsg) Append(b []byte) []byte {
	for _, w := range [...]uint64{v.IOVA, v.Size, v.UVA} {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return append(b, v.Perm, v.Type, 0, 0, 0, 0, 0, 0)
}

// DecodeIOTLBMsg decodes the first 32 bytes of b.
func DecodeIOTLBMsg(b []byte) IOTLBMsg {
	return IOTLBMsg{
		IOVA: binary.LittleEndian.Uint64(b), Size: binary.LittleEndian.Uint64(b[8:]), UVA: binary.LittleEndian.Uint64(b[16:]),
		Perm: b[24], Type: b[25],
	}
}

// errUntranslated means that the front-end was asked for an address and that what
// needs it waits for the answer.
var errUntranslated = errors.New("is not translated yet")

// followIOMMU decides whether addresses are IOVAs. A front-end that acknowledges
// ACCESS_PLATFORM but cannot be asked has no IOMMU between: its addresses are as
// without the feature.
func (s *Session) followIOMMU() {
	const channel = ProtoBackendReq | ProtoReplyAck
	switch on := s.acked.Has(virtio.FAccessPlatform) && s.protocol&channel == channel; {
	case !on:
		s.iotlb = nil
	case s.iotlb == nil:
		s.iotlb = guestmem.NewIOTLB(s.mem, s.back.poke)
	}
	s.back.serve(s.iotlb)
}

// via is what translates the addresses of descriptors, nil without an IOMMU and with
// all memory there.
func (s *Session) via() guestmem.Translator {
	if s.post != nil {
		return s.viaArrival()
	}
	if s.iotlb == nil {
		return nil
	}
	return s.iotlb
}

// ringIOVA translates an area of a ring, or asks for what is missing of it.
func (s *Session) ringIOVA(addr, n uint64, write bool) (host uintptr, err error) {
	for {
		host, missing, outcome := s.iotlb.Area(addr, n, write)
		switch {
		case outcome == guestmem.Mapped:
			return host, nil
		case outcome == guestmem.Unmapped:
			return 0, errors.New("is not contiguous in the guest's memory, which is not supported")
		case !s.iotlb.Want(missing, 1, write):
			return 0, errUntranslated
		}
	}
}

// iotlbMsg takes a translation or takes it back.
func (s *Session) iotlbMsg(m *message) error {
	if s.iotlb == nil {
		return errors.New("no IOMMU: VIRTIO_F_ACCESS_PLATFORM, BACKEND_REQ and REPLY_ACK were not all acknowledged")
	}
	v := DecodeIOTLBMsg(m.body)
	switch v.Type {
	case IOTLBUpdate:
		replaced, err := s.iotlb.Update(v.IOVA, v.Size, v.UVA, v.Perm)
		if err != nil {
			return err
		}
		if replaced {
			err = s.retranslate(v.IOVA, v.IOVA+(v.Size-1))
		} else {
			err = s.unpark()
		}
		s.dev.Retry()
		s.startReady()
		return err
	case IOTLBInvalidate:
		s.iotlb.Invalidate(v.IOVA, v.Size)
		return s.retranslate(v.IOVA, guestmem.LastAddr(v.IOVA, v.Size))
	}
	return fmt.Errorf("IOTLB message of type %d, accepted are 2 (update) and 3 (invalidate)", v.Type)
}

// retranslate has running rings forget what they know of addresses, because the
// translations from first to last changed. A ring that lies there itself is
// parked until it is found again.
func (s *Session) retranslate(first, last uint64) error {
	var live []RingAddrs
	for _, r := range s.rings {
		if r == nil || !r.started {
			continue
		}
		if !r.at.OK || s.touches(r, first, last) {
			s.relocateOne(r, s.mem)
		}
		live = append(live, r.at)
	}
	return s.dev.SetMemory(s.mem, live)
}

// unpark has rings run again that are found now.
func (s *Session) unpark() error {
	var found []RingAddrs
	for _, r := range s.rings {
		if r == nil || !r.started || r.at.OK {
			continue
		}
		if s.relocateOne(r, s.mem); r.at.OK {
			found = append(found, r.at)
		}
	}
	if found == nil {
		return nil
	}
	return s.dev.SetMemory(s.mem, found)
}

// touches reports whether an area of the ring has an address from first to last.
func (s *Session) touches(r *ring, first, last uint64) bool {
	for _, a := range s.areas(r) {
		if a.addr <= last && first <= a.addr+(a.bytes-1) {
			return true
		}
	}
	return false
}
