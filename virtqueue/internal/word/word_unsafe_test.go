package word

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func TestWords(t *testing.T) {
	mem, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	// SAFETY: the address of a mapping outside the Go heap, which does not move.
	base := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	for i := range mem {
		mem[i] = byte(i)
	}
	for off := uintptr(2); off < 64; off += 2 {
		want := uint16(off) | uint16(off+1)<<8
		if a, b := Load16Acquire(base+off), Load16(base+off); a != want || b != want {
			t.Errorf("offset %d: %#x, %#x, want %#x", off, a, b, want)
		}
	}
	if v := Load64(base + 1); v != 0x0807060504030201 {
		t.Errorf("Load64 = %#x", v)
	}
	if v := Load8(base + 9); v != 9 {
		t.Errorf("Load8 = %#x", v)
	}
	Store16Release(base+2, 0xbeef)
	Store16(base+6, 0xfeed)
	Store64(base+9, 0x1122334455667788)
	Store64Release(base+24, 0x0123456789abcdef)
	Store32(base+32, 0x76543210)
	if v := Load64Acquire(base + 24); v != 0x0123456789abcdef {
		t.Errorf("Load64Acquire = %#x", v)
	}
	if v := Load32(base + 32); v != 0x76543210 {
		t.Errorf("Load32 = %#x", v)
	}
	if mem[24] != 0xef || mem[31] != 0x01 || mem[32] != 0x10 || mem[36] != 36 {
		t.Errorf("bytes %x", mem[24:37])
	}
	Fence()
	want := []byte{0, 1, 0xef, 0xbe, 4, 5, 0xed, 0xfe, 8, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 17}
	for i, v := range want {
		if mem[i] != v {
			t.Errorf("byte %d = %#x, want %#x", i, mem[i], v)
		}
	}
}
