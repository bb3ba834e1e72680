package nettest

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// Regions of a guest's memory: rings, buffers, in files of their own, the buffers not at their file's beginning. Guest, front-end and
// host addresses all differ, and there is a hole between the regions.
const (
	ringRegion = iota
	bufferRegion
)

const pageSize = 4096

// Canaries are what buffers lie between; nobody writes there after the start.
const (
	canary      = 0xc5
	canaryLen   = 64
	poison      = 0xa5 // in receive buffers that are posted
	overwritten = 0x5a // in source buffers that the back-end gave back
)

// newMemory shares memory for rings and buffers of so many bytes each.
func newMemory(rings, buffers uint64) (*frontend.Memory, error) {
	m := &frontend.Memory{}
	for i, spec := range []guestmem.RegionSpec{
		{GPA: 0x1_0000_0000, UVA: 0x7e00_0000_0000, Size: rings},
		{GPA: 0x1_c000_0000, UVA: 0x7e80_0000_0000, Size: buffers, MmapOffset: 4 * pageSize},
	} {
		spec.Size = (spec.Size + pageSize - 1) &^ (pageSize - 1)
		r, err := m.Add(spec)
		if err == nil {
			_, err = unix.FcntlInt(uintptr(r.FD), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("guest memory, region %d: %w", i, err), m.Close())
		}
	}
	return m, nil
}

// buffer is a piece of guest memory between canaries.
type buffer struct {
	gpa  uint64
	data []byte
	all  []byte // with both canaries
}

func newBuffer(m *frontend.Memory, n int) (buffer, error) {
	size := uint64(n+63)&^63 + 2*canaryLen
	at, err := m.Alloc(bufferRegion, size, 64)
	if err != nil {
		return buffer{}, err
	}
	all := m.Bytes(at, size)
	for i := range all {
		all[i] = canary
	}
	return buffer{gpa: at + canaryLen, data: all[canaryLen : canaryLen+n : canaryLen+n], all: all}, nil
}

// intact says whether what is around the buffer is as it was.
func (b *buffer) intact() bool {
	return only(b.all[:canaryLen], canary) && only(b.all[canaryLen+len(b.data):], canary)
}

// only says whether all bytes are c.
func only(b []byte, c byte) bool {
	for len(b) > 0 {
		n := min(len(b), len(fills[c]))
		if string(b[:n]) != string(fills[c][:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

func fill(b []byte, c byte) {
	for len(b) > 0 {
		b = b[copy(b, fills[c]):]
	}
}

// fills are runs of the bytes that memory is filled with.
var fills = func() (f [256][]byte) {
	for _, c := range []byte{canary, poison, overwritten} {
		f[c] = make([]byte, pageSize)
		for i := range f[c] {
			f[c][i] = c
		}
	}
	return f
}()
