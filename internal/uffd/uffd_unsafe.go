package uffd

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// include/uapi/linux/userfaultfd.h
const (
	apiVersion = 0xAA

	featureMissingHugetlbfs = 1 << 4
	featureMissingShmem     = 1 << 5

	eventPagefault = 0x12

	registerModeMissing = 1 << 0

	ioctlsRegister, ioctlsUnregister = 0, 1 // bits of uffdio_api.ioctls
	ioctlsWake, ioctlsCopy           = 2, 3 // bits of uffdio_register.ioctls

	ioctlAPI      = 0xc018aa3f
	ioctlRegister = 0xc020aa00
	ioctlWake     = 0x8010aa02
	ioctlCopy     = 0xc028aa03

	deviceNew = 0xaa00 // USERFAULTFD_IOC_NEW of /dev/userfaultfd
)

type uffdioAPI struct{ api, features, ioctls uint64 }

type uffdioRange struct{ start, len uint64 }

type uffdioRegister struct {
	uffdioRange
	mode, ioctls uint64
}

// uffdioCopy is the front-end's.
type uffdioCopy struct {
	dst, src, len, mode uint64
	copied              int64
}

// open opens a userfaultfd of this process that also reports faults of the kernel, which MADV_POPULATE_READ
// is, and shakes hands with it. /dev/userfaultfd asks for no more than permission to open it (Linux 6.1); the
// system call wants CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1. One of UFFD_USER_MODE_ONLY, which anybody
// may have, is of no use: it answers the kernel's faults with an error.
func open() (fd int, err error) {
	if fd, err = openAny(); err != nil {
		return -1, err
	}
	api := uffdioAPI{api: apiVersion, features: featureMissingShmem | featureMissingHugetlbfs}
	// SAFETY: the kernel reads and writes one uffdio_api, which outlives the call.
	if err := ioctl(fd, ioctlAPI, unsafe.Pointer(&api)); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("UFFDIO_API with faults of shared memory and huge pages: %w", err)
	}
	if need := uint64(1<<ioctlsRegister | 1<<ioctlsUnregister); api.ioctls&need != need {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("userfaultfd offers the ioctls %#x, %#x are needed", api.ioctls, need)
	}
	return fd, nil
}

func openAny() (fd int, err error) {
	if dev, err := unix.Open("/dev/userfaultfd", unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		defer unix.Close(dev)
		if r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(dev), deviceNew, unix.O_CLOEXEC|unix.O_NONBLOCK); errno == 0 {
			return int(r), nil
		}
	}
	r, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		return -1, fmt.Errorf("%w (it takes access to /dev/userfaultfd, CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1)", os.NewSyscallError("userfaultfd", errno))
	}
	return int(r), nil
}

// register has faults of pages that are missing from [addr, addr+length) go to fd.
func register(fd int, addr, length uintptr) error {
	r := uffdioRegister{uffdioRange: uffdioRange{uint64(addr), uint64(length)}, mode: registerModeMissing}
	// SAFETY: the kernel reads and writes one uffdio_register, which outlives the call.
	if err := ioctl(fd, ioctlRegister, unsafe.Pointer(&r)); err != nil {
		return fmt.Errorf("UFFDIO_REGISTER of %d bytes: %w (memory of a memfd, tmpfs or hugetlbfs is needed)", length, err)
	}
	if need := uint64(1<<ioctlsWake | 1<<ioctlsCopy); r.ioctls&need != need {
		return fmt.Errorf("the registered memory offers the ioctls %#x, %#x are needed", r.ioctls, need)
	}
	return nil
}

// copyPage is UFFDIO_COPY of src to dst.
func copyPage(fd int, dst uintptr, src []byte) error {
	// SAFETY: src is not empty, and the kernel reads len(src) bytes of it during the ioctl below, which keeps it alive.
	c := uffdioCopy{dst: uint64(dst), src: uint64(uintptr(unsafe.Pointer(&src[0]))), len: uint64(len(src))}
	// SAFETY: the kernel reads and writes one uffdio_copy, which outlives the call.
	return ioctl(fd, ioctlCopy, unsafe.Pointer(&c))
}

// wake has those who wait for pages of the range look again.
func wake(fd int, addr, length uintptr) error {
	r := uffdioRange{uint64(addr), uint64(length)}
	// SAFETY: the kernel reads one uffdio_range, which outlives the call.
	return ioctl(fd, ioctlWake, unsafe.Pointer(&r))
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	// SAFETY: the caller's argument is what request says; the conversion is in the call, as unsafe.Pointer demands.
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// mapping is a part of a file of a guest's memory, which nobody here reads or writes.
type mapping struct{ addr, length uintptr }

// mapFile maps length bytes of the file. fd must be open for writing too, or it cannot be registered.
func mapFile(fd int, offset int64, length uintptr) (m mapping, err error) {
	// SAFETY: the kernel chooses the address; nothing of ours is replaced.
	p, err := unix.MmapPtr(fd, offset, nil, length, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return m, os.NewSyscallError("mmap", err)
	}
	m = mapping{uintptr(p), length}
	// A huge page would bring pages that have not arrived. Kernels without huge pages know no such advice.
	_ = m.advise(0, length, unix.MADV_NOHUGEPAGE)
	return m, nil
}

// populate returns when the n bytes at off are in the page cache, however long that takes.
func (m mapping) populate(off, n uintptr) error {
	for {
		err := m.advise(off, n, unix.MADV_POPULATE_READ)
		if err != unix.EINTR && err != unix.EAGAIN {
			return os.NewSyscallError("madvise", err)
		}
	}
}

func (m mapping) advise(off, n uintptr, advice int) error {
	// SAFETY: the range lies in the mapping (checked by the callers), which is not of the Go heap.
	b := unsafe.Slice((*byte)(unsafe.Add(nil, m.addr+off)), n)
	return unix.Madvise(b, advice)
}

func (m mapping) unmap() error {
	// SAFETY: the range is what mmap returned; nobody uses it any more.
	return unix.MunmapPtr(unsafe.Add(nil, m.addr), m.length)
}
