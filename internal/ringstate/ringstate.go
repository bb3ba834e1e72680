// Package ringstate keeps words about the rings of one guest in memory that outlives the process: a
// file in a directory, or a memfd that somebody holds on to. A process that is killed at any instruction leaves them as
// they were then, because both sides of that moment look at the same pages.
//
// What the words mean is the matter of whoever stores them. This package knows which ring they belong to: an identity
// that the caller gives, and whether the ring was stopped in order since.
package ringstate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	// MaxRings and MaxWords bound what a file can hold.
	MaxRings = 256
	MaxWords = 32768 + 1

	// magic and version begin a file.
	magic   = 0x7473676e69726876 // "vhrings" and "t"
	version = 1

	headerLen = 4096
	ringLen   = (8*(identityWords+ringWords+MaxWords) + 4095) &^ 4095

	identityWords = 16
	ringWords     = 2 // identity in use, number of words
)

// Identity says which ring it is: whatever tells one set-up of a ring from another.
type Identity = [identityWords]uint64

// Store is the state of one guest's rings. Its methods are for one goroutine, except that the words it returned may be used from
// any until they are given back by Stop or Close.
type Store struct {
	file   *os.File
	memory []byte
	path   string // empty for a memfd
}

// Open opens the state of a guest in directory dir, or begins it, with permissions 0600. A file that is not such a state, not
// this user's alone, or in use, is left to whoever has it and replaced by a new one, and damage says why.
func Open(dir, guest string) (s *Store, damage error, err error) {
	path := filepath.Join(dir, guest+".rings")
	f, damage := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o600)
	if damage == nil {
		if damage = judge(f); damage != nil {
			f.Close()
		}
	}
	if damage != nil {
		if f, err = replace(path); err != nil {
			return nil, damage, err
		}
	}
	s, err = adopt(f)
	if err != nil {
		return nil, damage, err
	}
	s.path = path
	return s, damage, nil
}

// replace makes a new file at path.
func replace(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("ring state: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("ring state: %w", err)
	}
	if damage := judge(f); damage != nil {
		f.Close()
		return nil, fmt.Errorf("ring state: %s, which is new: %w", path, damage)
	}
	return f, nil
}

// InMemory begins a state in a memfd, which ends with the process unless somebody else keeps its descriptor (File).
func InMemory(guest string) (*Store, error) {
	fd, err := unix.MemfdCreate("vhostd-rings-"+guest, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("ring state: memfd: %w", err)
	}
	return adopt(os.NewFile(uintptr(fd), "vhostd-rings-"+guest))
}

// FromFile takes over a memfd of an earlier process. One that is no state is begun anew, and damage says why. f is consumed.
func FromFile(f *os.File, guest string) (s *Store, damage error, err error) {
	if damage = judge(f); damage == nil {
		s, err = adopt(f)
		return s, nil, err
	}
	f.Close()
	s, err = InMemory(guest)
	return s, damage, err
}

// judge says why a file cannot be used as it is; an empty one can.
func judge(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("fstat: %w", err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return errors.New("it is no regular file")
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("it belongs to user %d", st.Uid)
	case st.Mode&0o077 != 0 && st.Nlink > 0:
		return fmt.Errorf("others have access to it (mode %#o, 0600 is right)", st.Mode&0o777)
	case st.Nlink > 1:
		return fmt.Errorf("it has %d names", st.Nlink)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("another process uses it: %w", err)
	}
	switch {
	case st.Size == 0:
		return nil
	case st.Size != fileLen:
		return fmt.Errorf("it has %d bytes, %d are right", st.Size, fileLen)
	}
	var header [16]byte
	if _, err := f.ReadAt(header[:], 0); err != nil {
		return fmt.Errorf("its header: %w", err)
	}
	if m, v := binary.NativeEndian.Uint64(header[:]), binary.NativeEndian.Uint64(header[8:]); m != magic || v != version {
		return fmt.Errorf("it begins with %#x and version %d, %#x and %d are right", m, v, uint64(magic), version)
	}
	return nil
}

const fileLen = headerLen + MaxRings*ringLen

// adopt maps a judged file.
func adopt(f *os.File) (s *Store, err error) {
	fd := int(f.Fd())
	s = &Store{file: f}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if err := unix.Ftruncate(fd, fileLen); err != nil {
		return nil, fmt.Errorf("ring state: %d bytes: %w", fileLen, err)
	}
	// A file that shrinks would take the process with it. Files in a directory have no seals.
	_, _ = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	if err := s.allocate(0, headerLen); err != nil {
		return nil, err
	}
	if s.memory, err = unix.Mmap(fd, 0, fileLen, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("ring state: mmap: %w", err)
	}
	_ = unix.Madvise(s.memory, unix.MADV_DONTFORK)
	header := words(s.memory[:headerLen])
	header[1] = version
	header[0] = magic
	return s, nil
}

// allocate reserves the pages of a range: a file system that is full must say so now, not by a signal on first touch.
func (s *Store) allocate(at, n int) error {
	if err := unix.Fallocate(int(s.file.Fd()), 0, int64(at), int64(n)); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("ring state: %d bytes in %s: %w", n, s.file.Name(), err)
	}
	return nil
}

// Start gives ring i its n words. same is true if they are those of the last Start with the same identity, and the ring
// was not stopped since; otherwise what they are is not defined.
func (s *Store) Start(i int, id Identity, n int) (w []uint64, same bool, err error) {
	if i < 0 || i >= MaxRings || n < 0 || n > MaxWords {
		return nil, false, fmt.Errorf("ring state: %d words of ring %d, at most %d of %d rings are kept", n, i, MaxWords, MaxRings)
	}
	at := headerLen + i*ringLen
	if err := s.allocate(at, 8*(identityWords+ringWords+n)); err != nil {
		return nil, false, err
	}
	all := words(s.memory[at : at+ringLen])
	known, state, w := all[:identityWords], all[identityWords:identityWords+ringWords], all[identityWords+ringWords:][:n:n]
	if state[0] == 1 && state[1] == uint64(n) && slices.Equal(known, id[:]) {
		return w, true, nil
	}
	state[0] = 0
	copy(known, id[:])
	state[1] = uint64(n)
	clear(w)
	state[0] = 1
	return w, false, nil
}

// Stop says that ring i was stopped in order and whoever started it was told where: its words are worth nothing any more.
func (s *Store) Stop(i int) {
	if i < 0 || i >= MaxRings {
		return
	}
	at := headerLen + i*ringLen
	if err := s.allocate(at, 8*(identityWords+ringWords)); err != nil {
		return // the ring never started, so that there is nothing to end
	}
	words(s.memory[at : at+ringLen])[identityWords] = 0
}

// OnDisk reports whether the state is on a file system that writes pages back to a disk, which can hold up a worker that
// changes one; tmpfs does not.
func (s *Store) OnDisk() bool {
	var fs unix.Statfs_t
	return unix.Fstatfs(int(s.file.Fd()), &fs) == nil && fs.Type != unix.TMPFS_MAGIC
}

// File is the store's file, for somebody who keeps a duplicate of its descriptor.
func (s *Store) File() *os.File { return s.file }

// Close unmaps the state and leaves its file for the next process. No words may be in use.
func (s *Store) Close() error {
	return errors.Join(unix.Munmap(s.memory), s.file.Close())
}

// Remove is Close for a guest that does not come back: its file goes away.
func (s *Store) Remove() error {
	err := s.Close()
	if s.path != "" {
		err = errors.Join(err, os.Remove(s.path))
	}
	return err
}
