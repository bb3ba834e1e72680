package vhostuser

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
)

// ringAddress translates an address of SET_VRING_ADDR if all n bytes from there on lie in
// one region of t. It is a front-end virtual address, a guest physical one once
// GPA_ADDRESSES was acknowledged, and an IOVA behind an IOMMU; then, and while memory is
// still to arrive, the error may be errUntranslated.
func (s *Session) ringAddress(t *guestmem.Table, addr, n uint64, write bool) (host uintptr, err error) {
	if host, err = s.translateRing(t, addr, n, write); err == nil && s.arrival != nil && !s.arrival.Holds(host, n) {
		return 0, errUntranslated
	}
	return host, err
}

func (s *Session) translateRing(t *guestmem.Table, addr, n uint64, write bool) (host uintptr, err error) {
	ok := false
	switch {
	case s.iotlb != nil:
		return s.ringIOVA(addr, n, write)
	case s.protocol&ProtoGPAAddresses == 0:
		host, ok = t.LookupUVA(addr, n)
	default:
		var run uint64
		host, run = t.Lookup(addr, n)
		ok = run == n && n > 0
	}
	if !ok {
		return 0, errors.New("is not inside one memory region")
	}
	return host, nil
}

// addressKind names what ringAddress translates.
func (s *Session) addressKind() string {
	switch {
	case s.iotlb != nil:
		return "IOVA"
	case s.protocol&ProtoGPAAddresses == 0:
		return "front-end address"
	}
	return "guest address"
}

// setVringEndian confirms little endian, which all rings here are, and refuses anything
// else. CROSS_ENDIAN is not offered: a front-end would acknowledge it for the sake of a
// legacy guest of the other byte order only, which cannot be served.
func (s *Session) setVringEndian(m *message) error {
	const little, big = 0, 1
	r, order, err := s.stateOf(m)
	switch {
	case err != nil:
		return err
	case order == big:
		return fmt.Errorf("ring %d: big-endian rings, as of a legacy guest of that byte order, are not supported; a virtio 1 driver has little-endian ones", r.index)
	case order != little:
		return fmt.Errorf("ring %d: byte order %d, 0 (little endian) is accepted", r.index, order)
	}
	return nil
}
