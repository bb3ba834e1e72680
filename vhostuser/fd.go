package vhostuser

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// fd owns one file descriptor. The zero value owns none. Ownership moves by
// take, never by plain assignment of a variable that lives on.
type fd struct{ plusOne int }

func ownFD(n int) fd { return fd{n + 1} }

// num returns the descriptor for use while f owns it, -1 if there is none.
func (f fd) num() int { return f.plusOne - 1 }

func (f fd) ok() bool { return f.plusOne != 0 }

func (f *fd) take() fd {
	moved := *f
	f.plusOne = 0
	return moved
}

// close closes the descriptor, if any. The error is of no use to anybody: Linux
// releases the number in any case and an eventfd or memfd has nothing to flush.
func (f *fd) close() {
	if f.ok() {
		_ = unix.Close(f.num())
		f.plusOne = 0
	}
}

// eventfd is what /proc says of an eventfd (anon_inode_getfile in fs/eventfd.c).
const eventfd = "anon_inode:[eventfd]"

// notifies refuses a descriptor that is no eventfd. A read or write of any other kind of
// file, or a look whether it is ready, can wait for the peer without end, and with it the
// worker that serves other guests too: on a full socket, on a file of a FUSE server, or
// on a pipe whose lock somebody holds who splices into it from an empty socket.
func (f fd) notifies() error {
	kind, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.num()))
	switch {
	case err != nil:
		return fmt.Errorf("what kind of file the descriptor is cannot be told: %w (is /proc mounted?)", err)
	case kind == eventfd:
		return nil
	}
	return fmt.Errorf("the descriptor is no eventfd but %s", kind)
}
