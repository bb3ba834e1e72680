package sandbox

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/psx"
)

// setCapabilities makes set the permitted and effective set of every thread and empties the inheritable one.
func setCapabilities(set uint64) error {
	header := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3} // pid 0: the calling thread
	data := &[2]unix.CapUserData{
		{Effective: uint32(set), Permitted: uint32(set)},
		{Effective: uint32(set >> 32), Permitted: uint32(set >> 32)},
	}
	// SAFETY: capset(2) reads one header and, for version 3, two data structures, all of which live until psx returns: the
	// arguments of its calls escape.
	if _, _, errno := psx.Syscall3(unix.SYS_CAPSET, uintptr(unsafe.Pointer(header)), uintptr(unsafe.Pointer(data)), 0); errno != 0 {
		return errno
	}
	return nil
}

// loadFilter sets a filter of system calls on all threads, for flags with SECCOMP_FILTER_FLAG_TSYNC.
func loadFilter(program []unix.SockFilter, flags uintptr) error {
	// SAFETY: the pointer is that of a slice that is not empty, with its length beside it.
	p := &unix.SockFprog{Len: uint16(len(program)), Filter: unsafe.SliceData(program)}
	// SAFETY: seccomp(2) reads the structure and Len instructions of the slice, which both live until it returns: p is converted in
	// the call's own argument, and points to the slice.
	thread, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(p)))
	switch {
	case errno != 0:
		return errno
	case thread != 0:
		return fmt.Errorf("thread %d has another filter already", thread)
	}
	return nil
}
