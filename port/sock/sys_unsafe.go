package sock

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/port/internal/stock"
)

// describe makes msg describe iov. Nothing else of it is ever set: no address, and no room for descriptors of the peer.
func describe(msg *unix.Msghdr, iov []stock.Iovec) {
	// SAFETY: stock.Iovec has the layout of struct iovec; the slice is part of the queue that holds msg too.
	msg.Iov = (*unix.Iovec)(unsafe.Pointer(unsafe.SliceData(iov)))
	msg.SetIovlen(len(iov))
}

// sendmsg writes one frame. It never waits, so the thread may keep its processor: the call lasts as long as the kernel works on
// the frame. The caller's loop must have a call with a stack check, which this is, for the collector's sake.
//
//go:noinline
func sendmsg(fd int, msg *unix.Msghdr, iov []stock.Iovec) unix.Errno {
	describe(msg, iov)
	// SAFETY: msg is live and valid; the kernel reads the fragments that it names, whose pages the caller holds.
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(msg)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	return errno
}

// recvmsg reads one frame, under the same rules, and returns its whole length, also if iov has less room.
//
//go:noinline
func recvmsg(fd int, msg *unix.Msghdr, iov []stock.Iovec) (int, unix.Errno) {
	describe(msg, iov)
	// SAFETY: msg is live and valid; the kernel writes to the memory that it names, which is the caller's.
	n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(msg)), unix.MSG_DONTWAIT|unix.MSG_TRUNC)
	return int(n), errno
}
