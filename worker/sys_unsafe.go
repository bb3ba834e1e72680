package worker

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// epollPoll is epoll_wait with a zero timeout.
func epollPoll(epfd int, events []unix.EpollEvent) (int, error) {
	// SAFETY: the kernel writes at most len(events) records; the slice is not empty and
	// stays alive for the duration of the call.
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// drain reads fd once without blocking and without touching its flags, which the
// peer shares (RWF_NOWAIT). On an eventfd that cannot wait; a pipe's lock can be held.
func drain(fd int) {
	var buf [512]byte
	// SAFETY: the vector and the buffer it names live on this stack until the call returns.
	iov := unix.Iovec{Base: &buf[0], Len: uint64(len(buf))}
	const noOffset = ^uintptr(0)
	_, _, _ = unix.RawSyscall6(unix.SYS_PREADV2, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1, noOffset, noOffset, unix.RWF_NOWAIT)
}
