package nettest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
)

// A frame is an Ethernet header of the loopback protocol and, little-endian,
//
//	number of the frame  8 bytes
//	length of the frame  4
//	seed of the run      4
//
// then a pattern that depends on seed, number and place. The receiver knows all of it and compares every byte.
const (
	etherType = 0x9000 // ETH_P_LOOPBACK, as in the kernel's test
	headLen   = 14 + 16
)

// material is what patterns are pieces of: the pattern of a frame begins at a place that its number and the seed give.
var material = func() []byte {
	b := make([]byte, 2*MaxFrame)
	_, _ = rand.NewChaCha8([32]byte{'n', 'e', 't'}).Read(b)
	return b
}()

// mix spreads a number over 64 bits (the finalizer of MurmurHash3).
func mix(n uint64) uint64 {
	n ^= n >> 33
	n *= 0xff51afd7ed558ccd
	n ^= n >> 33
	n *= 0xc4ceb9fe1a85ec53
	return n ^ n>>33
}

// flow is a sequence of frames in one direction. Two flows, of sender and receiver, run through the same frames.
type flow struct {
	seed     uint32
	src, dst [6]byte
	sizes    []int
	swapped  bool // the back-end may exchange the addresses
	next     uint64
	head     [headLen]byte // scratch
}

func (f *flow) size(n uint64) int { return f.sizes[n%uint64(len(f.sizes))] }

// longest is the length of the longest frame.
func (f *flow) longest() (n int) {
	for _, s := range f.sizes {
		n = max(n, s)
	}
	return n
}

// frame gives the two parts of frame n, the first valid until the next call.
func (f *flow) frame(n uint64) (head, pattern []byte) {
	size := f.size(n)
	copy(f.head[:6], f.dst[:])
	copy(f.head[6:12], f.src[:])
	binary.BigEndian.PutUint16(f.head[12:], etherType)
	binary.LittleEndian.PutUint64(f.head[14:], n)
	binary.LittleEndian.PutUint32(f.head[22:], uint32(size))
	binary.LittleEndian.PutUint32(f.head[26:], f.seed)
	at := mix(n^uint64(f.seed)<<32) % MaxFrame
	return f.head[:], material[at : at+uint64(size-headLen)]
}

// write makes the next frame in b, which has room for it, and returns its length.
func (f *flow) write(b []byte) int {
	head, pattern := f.frame(f.next)
	f.next++
	return copy(b, head) + copy(b[headLen:], pattern)
}

// ours says whether a frame is of this test: a network has others too, such as IPv6's neighbor discovery.
func ours(b []byte) bool { return len(b) >= 14 && binary.BigEndian.Uint16(b[12:]) == etherType }

// check wants b to be the next frame.
func (f *flow) check(b []byte) error {
	head, pattern := f.frame(f.next)
	if len(b) != headLen+len(pattern) || !bytes.Equal(b[12:headLen], head[12:]) || !bytes.Equal(b[headLen:], pattern) || !f.addresses(b, head) {
		return f.explain(b)
	}
	f.next++
	return nil
}

func (f *flow) addresses(b, head []byte) bool {
	return bytes.Equal(b[:12], head[:12]) || f.swapped && bytes.Equal(b[:6], head[6:12]) && bytes.Equal(b[6:12], head[:6])
}

// explain says what is wrong with a frame that is not the next one.
func (f *flow) explain(b []byte) error {
	if len(b) >= headLen {
		if n := binary.LittleEndian.Uint64(b[14:]); n != f.next {
			other := *f
			if other.next = n; other.check(b) == nil {
				if n < f.next {
					return fmt.Errorf("frame %d came again instead of frame %d", n, f.next)
				}
				return fmt.Errorf("frame %d came instead of frame %d: that one is lost or late", n, f.next)
			}
		}
	}
	head, pattern := f.frame(f.next)
	want := append(bytes.Clone(head), pattern...)
	at := 0
	for at < min(len(b), len(want)) && b[at] == want[at] {
		at++
	}
	return fmt.Errorf("frame %d is damaged: %d bytes came, want %d; they differ from byte %d on", f.next, len(b), len(want), at)
}
