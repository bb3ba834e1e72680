package tap

import (
	"github.com/vhostd/vhostd/port/internal/stock"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtio"
)

// writev writes one frame. The descriptor is non-blocking, so the thread may keep its processor: the call lasts as long as the
// kernel works on the frame. The caller's loop must have a call with a stack check, which this is, for the collector's sake.
//
//go:noinline
func writev(fd int, iov []stock.Iovec) (int, unix.Errno) {
	// SAFETY: the kernel reads len(iov) entries of a live slice, and the fragments they name, whose pages the caller holds.
	n, _, errno := unix.RawSyscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
	return int(n), errno
}

// readv reads one frame, under the same rules.
//
//go:noinline
func readv(fd int, iov []stock.Iovec) (int, unix.Errno) {
	// SAFETY: the kernel reads len(iov) entries of a live slice and writes to the memory they name, which is the caller's.
	n, _, errno := unix.RawSyscall(unix.SYS_READV, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
	return int(n), errno
}

// header makes a pointer of the address of a queue's header.
func header(addr uintptr) *virtio.NetHdr {
	// SAFETY: addr is the start of an arena page that the queue allocated: outside the Go heap, aligned to a page, and with
	// room for the header, whose layout is the wire's (virtio.NetHdr).
	return (*virtio.NetHdr)(*(*unsafe.Pointer)(unsafe.Pointer(&addr)))
}

// storeHeader writes h for the kernel to read in a call that follows on this thread.
func storeHeader(addr uintptr, h *virtio.NetHdr) {
	*header(addr) = virtio.NetHdr{Flags: h.Flags, GSOType: h.GSOType, HdrLen: h.HdrLen, GSOSize: h.GSOSize,
		CsumStart: h.CsumStart, CsumOffset: h.CsumOffset}
}

// loadHeader reads what the kernel wrote in a call before on this thread.
func loadHeader(h *virtio.NetHdr, addr uintptr) { *h = *header(addr) }
