package worker

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// iocb is struct iocb of linux/aio_abi.h on a little-endian machine.
type iocb struct {
	_             uint64    // aio_data
	_, _          uint32    // aio_key, aio_rw_flags
	opcode        uint16    // aio_lio_opcode
	_             uint16    // aio_reqprio
	fd            uint32    // aio_fildes
	_             [4]uint64 // aio_buf, aio_nbytes, aio_offset, aio_reserved2
	flags, result uint32    // aio_flags, aio_resfd
}

const (
	iocbPread = 0 // IOCB_CMD_PREAD
	iocbResFD = 1 // IOCB_FLAG_RESFD
)

// aioRing signals eventfds without ever waiting, whatever the mode of the descriptor: the kernel itself adds to the counter at
// the end of an asynchronous operation (eventfd_signal in fs/aio.c), and a full counter stays full. That costs several times a
// write. It belongs to the loop's thread.
type aioRing struct {
	context uintptr // 0: not set up
}

// aioEvents is the size of the completion ring. Every operation is over, and reaped, before the next.
const aioEvents = 1

func (a *aioRing) setUp() error {
	if a.context != 0 {
		return nil
	}
	// SAFETY: the kernel stores one word into a live variable.
	if _, _, errno := unix.RawSyscall(unix.SYS_IO_SETUP, aioEvents, uintptr(unsafe.Pointer(&a.context)), 0); errno != 0 {
		a.context = 0
		return errno
	}
	return nil
}

// signal adds one to the eventfd. The operation is a read of nothing from idle, an eventfd: it fails at once, which is an end
// like any other. setUp must have succeeded.
func (a *aioRing) signal(fd, idle int) {
	cb := iocb{opcode: iocbPread, fd: uint32(idle), flags: iocbResFD, result: uint32(fd)}
	list := [1]*iocb{&cb}
	// SAFETY: the kernel reads one pointer and the iocb that it names, both live until the call returns; a read of no bytes
	// touches no buffer.
	if _, _, errno := unix.RawSyscall(unix.SYS_IO_SUBMIT, a.context, 1, uintptr(unsafe.Pointer(&list))); errno != 0 {
		return
	}
	var event [4]uint64 // struct io_event
	// SAFETY: the kernel writes at most one record of 32 bytes into a live array; no record is waited for.
	_, _, _ = unix.RawSyscall6(unix.SYS_IO_GETEVENTS, a.context, 0, 1, uintptr(unsafe.Pointer(&event)), 0, 0)
}

func (a *aioRing) close() {
	if a.context != 0 {
		_, _, _ = unix.RawSyscall(unix.SYS_IO_DESTROY, a.context, 0, 0)
		a.context = 0
	}
}
