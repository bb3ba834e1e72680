package pagemem

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapAnonymous maps memory that starts on a huge page's boundary. Nothing is used before
// it is touched.
func mapAnonymous(name string, bytes uint64) (uintptr, error) {
	const flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_NORESERVE
	ptr, err := unix.MmapPtr(-1, 0, nil, uintptr(bytes)+size2M, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		return 0, fmt.Errorf("pagemem: map %d bytes: %w", bytes, err)
	}
	// SAFETY: the mapping is size2M longer than the arena, so the boundary and bytes
	// from it on lie inside; what is in front and behind is unmapped and never used.
	front := uintptr(roundUp(uint64(uintptr(ptr)), size2M)) - uintptr(ptr)
	base := unsafe.Add(ptr, front)
	if front > 0 {
		_ = unix.MunmapPtr(ptr, front)
	}
	if behind := size2M - front; behind > 0 {
		_ = unix.MunmapPtr(unsafe.Add(base, bytes), behind)
	}
	// SAFETY: as above. Without transparent huge pages in the kernel the advice is refused.
	_ = unix.Madvise(unsafe.Slice((*byte)(base), bytes), unix.MADV_HUGEPAGE)
	setName(base, bytes, name)
	return uintptr(base), nil
}

// setName shows in /proc/PID/maps what a mapping is; kernels without the option refuse.
func setName(base unsafe.Pointer, bytes uint64, name string) {
	text, err := unix.BytePtrFromString(name)
	if err != nil {
		return
	}
	// SAFETY: the kernel copies the string during the call, during which text is alive.
	_ = unix.Prctl(unix.PR_SET_VMA, unix.PR_SET_VMA_ANON_NAME, uintptr(base), uintptr(bytes), uintptr(unsafe.Pointer(text)))
}

// mapMemfd maps a sealed memfd, and closes it again: the mapping keeps it alive. With
// MFD_HUGETLB the mapping reserves its pages at once, so it fails instead of faulting
// later.
func mapMemfd(name string, bytes uint64, flags int) (uintptr, error) {
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return 0, fmt.Errorf("pagemem: memfd_create: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(bytes)); err != nil {
		return 0, fmt.Errorf("pagemem: size memfd to %d bytes: %w", bytes, err)
	}
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return 0, fmt.Errorf("pagemem: seal memfd: %w", err)
	}
	ptr, err := unix.MmapPtr(fd, 0, nil, uintptr(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return 0, fmt.Errorf("pagemem: map %d bytes: %w", bytes, err)
	}
	return uintptr(ptr), nil
}

// setNode sets the memory policy of a mapping to one node (mbind(2)).
func setNode(base uintptr, bytes uint64, mode, node int) error {
	var mask [(MaxNode + 1) / 64]uint64
	mask[node/64] = 1 << (node % 64)
	// SAFETY: the kernel reads the mask during the call, during which it is alive, and changes no memory. It takes one bit less than
	// it is told.
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, base, uintptr(bytes), uintptr(mode), uintptr(unsafe.Pointer(&mask)), MaxNode+2, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// populate has the kernel find all pages of a mapping now; the error is a system call's.
func populate(base uintptr, bytes uint64) error {
	// SAFETY: base and bytes are a mapping that was just made; nobody uses it yet.
	ptr := *(*unsafe.Pointer)(unsafe.Pointer(&base))
	return unix.Madvise(unsafe.Slice((*byte)(ptr), bytes), unix.MADV_POPULATE_WRITE)
}

func unmapArena(base uintptr, bytes uint64) error {
	// SAFETY: base and bytes are what mapArena returned; the arena has no page in use, so nobody refers into it.
	ptr := *(*unsafe.Pointer)(unsafe.Pointer(&base))
	if err := unix.MunmapPtr(ptr, uintptr(bytes)); err != nil {
		return fmt.Errorf("pagemem: unmap %d bytes: %w", bytes, err)
	}
	return nil
}

// poison overwrites a page that is being freed, so that a late reader sees it.
func poison(addr uintptr, n int) {
	// SAFETY: the caller is the only holder of the n bytes at addr, which lie in the arena's mapping.
	b := unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), n)
	for i := range b {
		b[i] = 0x6b
	}
}
