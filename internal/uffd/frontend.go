package uffd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// What a front-end does with the userfaultfd of a back-end.

// ErrNoFault says that no page was missed in time.
var ErrNoFault = errors.New("no fault is reported")

// NextFault returns the address, in the back-end's helper, of the next page that is missing. It waits at most
// wait; then the error is ErrNoFault.
func NextFault(fd int, wait time.Duration) (addr uint64, err error) {
	for end := time.Now().Add(wait); ; {
		left := time.Until(end)
		if left <= 0 {
			return 0, ErrNoFault
		}
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, int(left.Milliseconds())+1); err != nil && err != unix.EINTR {
			return 0, os.NewSyscallError("poll", err)
		}
		// struct uffd_msg: the event in the first byte, of a fault the address in the third word.
		var m [32]byte
		n, err := unix.Read(fd, m[:])
		switch {
		case err == unix.EAGAIN, err == unix.EINTR:
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == len(m) && m[0] == eventPagefault:
			return binary.LittleEndian.Uint64(m[16:]) &^ (1<<PageShift - 1), nil
		}
	}
}

// Place gives the page at addr its contents and wakes who waits for it. A page that is there already stays.
func Place(fd int, addr uint64, contents []byte) error {
	err := copyPage(fd, uintptr(addr), contents)
	if err == unix.EEXIST {
		return wake(fd, uintptr(addr), uintptr(len(contents)))
	}
	if err != nil {
		return fmt.Errorf("UFFDIO_COPY of %d bytes to %#x: %w", len(contents), addr, err)
	}
	return nil
}
