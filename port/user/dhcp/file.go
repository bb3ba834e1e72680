package dhcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	slotLen  = 128
	maxSlots = 2 * MaxLeases // of both address families
	// Layout of a slot: checksum of the rest, state, station, address, end as Unix seconds, length of the name, name.
	slotState, slotMAC, slotAddr, slotEnd, slotName = 4, 5, 11, 27, 35
)

// File is a [Store] in a file: a slot for each lease, which is written where it lies, so that a change costs one short write and a process
// may end at any moment. It is safe for concurrent use and serves servers of both address families. A write that fails is told once, by
// Close: leases are served without.
type File struct {
	mu    sync.Mutex
	file  *os.File
	slots map[netip.Addr]int64 // where leases lie
	free  []int64
	err   error
}

// OpenFile opens the leases in the file at path, which it makes with permissions 0600 if there is none. It returns those that it finds;
// what is damaged is left out. Links are not followed, and a file that somebody else has access to, or that another process uses, is
// refused.
func OpenFile(path string) (*File, []Lease, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("leases: %w", err)
	}
	s := &File{file: f, slots: map[netip.Addr]int64{}}
	leases, err := s.load()
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("leases: %s: %w", path, err), f.Close())
	}
	return s, leases, nil
}

func (s *File) load() (leases []Lease, err error) {
	info, err := s.file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, errors.New("it is no regular file")
	case info.Mode().Perm()&0o077 != 0:
		return nil, fmt.Errorf("others have access to it (mode %#o, 0600 is right)", info.Mode().Perm())
	}
	if info.Size() > maxSlots*slotLen {
		return nil, fmt.Errorf("it has %d bytes, files of leases have %d", info.Size(), maxSlots*slotLen)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && (int(st.Uid) != os.Geteuid() || st.Nlink > 1) {
		return nil, fmt.Errorf("it belongs to user %d and has %d names, user %d and one name are right", st.Uid, st.Nlink, os.Geteuid())
	}
	if err := unix.Flock(int(s.file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("another process uses it: %w", err)
	}
	if err := s.file.Truncate(maxSlots * slotLen); err != nil {
		return nil, err
	}
	all := make([]byte, maxSlots*slotLen)
	if _, err := s.file.ReadAt(all, 0); err != nil {
		return nil, err
	}
	for at := int64(0); at < int64(len(all)); at += slotLen {
		l, ok := decodeLease(all[at : at+slotLen])
		if _, twice := s.slots[l.Addr]; !ok || twice {
			s.free = append(s.free, at)
			continue
		}
		s.slots[l.Addr] = at
		leases = append(leases, l)
	}
	slices.Reverse(s.free) // the first is taken first
	return leases, nil
}

// Put implements [Store].
func (s *File) Put(l Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, known := s.slots[l.Addr]
	if !known {
		n := len(s.free)
		if n == 0 {
			return // there are as many slots as leases
		}
		at, s.free = s.free[n-1], s.free[:n-1]
		s.slots[l.Addr] = at
	}
	b := encodeLease(l)
	s.write(b[:], at)
}

// Remove implements [Store].
func (s *File) Remove(addr netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, known := s.slots[addr]; known {
		delete(s.slots, addr)
		s.free = append(s.free, at)
		s.write(make([]byte, slotLen), at)
	}
}

// write does without pwrite(2), which the process's sandbox does not allow.
func (s *File) write(b []byte, at int64) {
	_, err := s.file.Seek(at, io.SeekStart)
	if err == nil {
		_, err = s.file.Write(b)
	}
	if err != nil && s.err == nil {
		s.err = fmt.Errorf("leases: %w", err)
	}
}

// Close closes the file, and says whether something could not be written. The servers are not used any more.
func (s *File) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.err, s.file.Close())
}

var slotStates = []State{"", Bound, Released} // by number; an empty slot is zeros

func encodeLease(l Lease) (b [slotLen]byte) {
	b[slotState] = byte(max(slices.Index(slotStates, l.State), 0))
	copy(b[slotMAC:], l.MAC[:])
	addr := l.Addr.As16()
	copy(b[slotAddr:], addr[:])
	binary.LittleEndian.PutUint64(b[slotEnd:], uint64(l.Expires.Unix()))
	b[slotName] = byte(copy(b[slotName+1:], l.Name))
	binary.LittleEndian.PutUint32(b[:], crc32.ChecksumIEEE(b[slotState:]))
	return b
}

// latest is a time in seconds that no lease lasts until, and that JSON can still say.
const latest = 1 << 36

func decodeLease(b []byte) (l Lease, ok bool) {
	state, n := int(b[slotState]), int(b[slotName])
	if binary.LittleEndian.Uint32(b) != crc32.ChecksumIEEE(b[slotState:]) || state == 0 || state >= len(slotStates) || slotName+1+n > slotLen {
		return l, false
	}
	if end := int64(binary.LittleEndian.Uint64(b[slotEnd:])); end < 0 || end > latest {
		return l, false
	}
	return Lease{
		Addr: netip.AddrFrom16([16]byte(b[slotAddr:])).Unmap(), MAC: MAC(b[slotMAC : slotMAC+6]), Name: string(b[slotName+1 : slotName+1+n]),
		State: slotStates[state], Expires: time.Unix(int64(binary.LittleEndian.Uint64(b[slotEnd:])), 0),
	}, true
}
