package guestmem

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapping is what mmap returned for one region, margins of rounding included. The
// tables that hold the region share it, and the last one to let go unmaps it.
type mapping struct {
	addr, length uintptr
	file         fileID
	start, page  uint64 // where it begins in the file, and in what pages that is mapped
	bytes        int64  // reserved
	users        atomic.Int32
	arriving     atomic.Pointer[arriving] // nil if its pages are there
}

// fileID tells files apart as long as they are mapped, which keeps them from being
// deleted and their numbers from being given away.
type fileID struct{ dev, ino uint64 }

// is reports whether fd is the file that m maps.
func (m *mapping) is(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && m.file == fileID{uint64(st.Dev), st.Ino}
}

// release ends the use by one table.
func (m *mapping) release() error {
	if m.users.Add(-1) > 0 {
		return nil
	}
	// SAFETY: addr and length are those that mmap returned, and nobody is left who
	// uses them; no Go object lies in the range.
	err := unix.MunmapPtr(unsafe.Add(nil, m.addr), m.length)
	unreserve(m.bytes)
	return os.NewSyscallError("munmap", err)
}

// mapRegion maps the part of fd that holds s. delta is where s starts in the
// mapping, for mmap wants offsets in whole pages and a front-end need not.
func mapRegion(s RegionSpec, fd int) (m *mapping, delta uintptr, fail *RegionError) {
	file, page, fail := checkFile(s, fd)
	if fail != nil {
		return nil, 0, fail
	}
	if fail := reserve(int64(s.Size)); fail != nil {
		return nil, 0, fail
	}
	start := s.MmapOffset &^ (page - 1)
	head := s.MmapOffset - start
	length := (head + s.Size + page - 1) &^ (page - 1)
	// SAFETY: the kernel chooses the address; nothing of ours is replaced.
	p, err := unix.MmapPtr(fd, int64(start), nil, uintptr(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unreserve(int64(s.Size))
		return nil, 0, mmapError(err)
	}
	m = &mapping{addr: uintptr(p), length: uintptr(length), file: file, start: start, page: page, bytes: int64(s.Size)}
	// Guests' memory has no place in our core dumps, and fork must not copy its page tables.
	// Both are advice: a kernel that cannot do it changes nothing else.
	// SAFETY: the range is the mapping just made.
	b := unsafe.Slice((*byte)(p), length)
	_ = unix.Madvise(b, unix.MADV_DONTDUMP)
	_ = unix.Madvise(b, unix.MADV_DONTFORK)
	return m, uintptr(head), nil
}

func mmapError(err error) *RegionError {
	reason := "the file cannot be mapped"
	switch {
	case errors.Is(err, unix.EPERM):
		reason = "the file cannot be mapped writable (a memfd sealed against writing?); pass it without F_SEAL_WRITE"
	case errors.Is(err, unix.EACCES):
		reason = "the file is not open for reading and writing; " + shareHint
	case errors.Is(err, unix.ENOMEM):
		reason = "not enough address space or huge pages to map the file"
	}
	return &RegionError{Reason: reason, Err: os.NewSyscallError("mmap", err)}
}

// checkFile refuses what cannot back guest memory and returns which file it is
// and the page size that mmap of it works in.
func checkFile(s RegionSpec, fd int) (id fileID, page uint64, fail *RegionError) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return id, 0, &RegionError{Reason: fmt.Sprintf("file descriptor %d", fd), Err: os.NewSyscallError("fstat", err)}
	}
	if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFREG {
		return id, 0, &RegionError{Reason: fmt.Sprintf("the file descriptor is a %s, need a memfd, hugetlbfs or regular file; %s", kindName(kind), shareHint)}
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return id, 0, &RegionError{Reason: "reading the file's open mode", Err: os.NewSyscallError("fcntl", err)}
	}
	if flags&unix.O_ACCMODE != unix.O_RDWR || flags&unix.O_PATH != 0 {
		return id, 0, &RegionError{Reason: "the file is not open for reading and writing (QEMU: readonly=off on the memory backend); " + shareHint}
	}
	if uint64(st.Size) < s.MmapOffset+s.Size {
		return id, 0, &RegionError{Reason: fmt.Sprintf("the file has %#x bytes, the region ends at %#x", st.Size, s.MmapOffset+s.Size)}
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return id, 0, &RegionError{Reason: "the kind of the file's file system", Err: os.NewSyscallError("fstatfs", err)}
	}
	if name := remote[int64(fs.Type)]; name != "" {
		return id, 0, &RegionError{Reason: fmt.Sprintf("the file is on %s, whose server can hold up every access to a page; %s", name, shareHint)}
	}
	return fileID{uint64(st.Dev), st.Ino}, pageSize(&fs, &st), nil
}

// remote are the file systems that ask another process or machine for a page, and let the
// thread that touches it wait for as long as the answer takes. Anybody can be the server
// of a FUSE file (linux/magic.h).
var remote = map[int64]string{
	unix.FUSE_SUPER_MAGIC: "FUSE", unix.NFS_SUPER_MAGIC: "NFS", unix.V9FS_MAGIC: "9P", unix.CIFS_SUPER_MAGIC: "CIFS",
	unix.SMB2_SUPER_MAGIC: "SMB", unix.CEPH_SUPER_MAGIC: "Ceph", unix.AFS_SUPER_MAGIC: "AFS", unix.AFS_FS_MAGIC: "AFS",
	unix.CODA_SUPER_MAGIC: "Coda",
}

// pageSize is the huge page's size on hugetlbfs: there munmap refuses lengths
// that are not whole huge pages, and the pages would be lost (mmap(2)).
func pageSize(fs *unix.Statfs_t, st *unix.Stat_t) uint64 {
	page := uint64(os.Getpagesize())
	if fs.Type != unix.HUGETLBFS_MAGIC {
		return page
	}
	if huge := uint64(st.Blksize); huge > page && huge&(huge-1) == 0 {
		return huge
	}
	return page
}

func kindName(kind uint32) string {
	switch kind {
	case unix.S_IFIFO:
		return "pipe"
	case unix.S_IFDIR:
		return "directory"
	case unix.S_IFSOCK:
		return "socket"
	case unix.S_IFCHR:
		return "character device"
	case unix.S_IFBLK:
		return "block device"
	}
	return "special file"
}
