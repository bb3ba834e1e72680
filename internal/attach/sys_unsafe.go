package attach

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// iovec is the kernel's struct iovec with an address that the collector does not follow.
type iovec struct {
	base uintptr
	len  uint64
}

// readFrame reads one frame from a tap. The descriptor is non-blocking, so the thread may keep its processor. The caller's loop must
// have a call with a stack check, which this is, for the collector's sake.
//
//go:noinline
func readFrame(fd int, b []byte) (int, unix.Errno) {
	// SAFETY: the kernel writes at most len(b) bytes to b, which is not empty and outlives the call.
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), errno
}

// writeFrame writes one frame to a tap, under the same rules.
//
//go:noinline
func writeFrame(fd int, iov []iovec) unix.Errno {
	// SAFETY: the kernel reads len(iov) entries of a live slice. The memory they name is mapped by the connection and unmapped after
	// its workers ended, or the header of a pair, which is in the heap and held by the caller.
	_, _, errno := unix.RawSyscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
	return errno
}

// addressOf is where b, which is not empty and does not move, lies.
func addressOf(b []byte) uintptr {
	// SAFETY: b[0] exists; the number is used while its owner holds b: mapped memory, or an array in a struct in the heap.
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))
}
