package capture

import (
	"encoding/binary"
	"sync/atomic"
	"time"
)

// Direction is a frame's way, seen from the guest.
type Direction uint8

// The directions.
const (
	FromGuest Direction = 1
	ToGuest   Direction = 2
)

// Info describes a frame.
type Info struct {
	Time      time.Time
	Direction Direction
	Length    int    // of the frame, in bytes, of which fewer may be captured
	Mark      Mark   // what the frame still asks to be done
	Size      uint16 // payload bytes of a segment, if Mark says that there are several
}

// Mark says that a frame stands for several segments, which its receiver or a later device makes of it.
type Mark uint8

// The marks.
const (
	Whole Mark = iota
	TCPv4Segments
	TCPv6Segments
	UDPSegments
)

const (
	// recordLen is the length of what stands before each frame's bytes: bytes in the ring, captured bytes, length of the frame, frames
	// lost before, time, segment size, direction, mark.
	recordLen = 32
	align     = 8
	// DefaultRing is the room of a ring in bytes: a few milliseconds of 10 Gbit/s.
	DefaultRing = 4 << 20
	minRing     = 2 * (MaxSnapLen + recordLen + align)
)

// Ring takes the frames of one queue. Stage and Commit are for the one worker that owns the queue.
type Ring struct {
	w    *Writer
	data []byte
	// Positions only grow; the place in data is the position modulo its length. Who writes one of them has written what it covers.
	head, tail atomic.Uint64 // the end of what is published, and of what was taken
	next       uint64        // the end of what is staged; the owner's
	staged     [maxStaged]uint64
	nStaged    int
	lostAt     [maxStaged]uint32 // frames lost before the n-th staged one
	missed     uint32            // frames lost since the last staged one
	carried    uint32            // missed as it was after the last Commit
	lost       atomic.Uint64
}

// maxStaged is the largest batch.
const maxStaged = 64

// Stage makes room for a frame of which at most captured bytes are kept, and returns where they belong, or nil if the frame is lost.
// The frame is in the file once a Commit says that it passed. At most 64 frames may be staged at once.
func (r *Ring) Stage(info Info, captured int) []byte {
	captured = min(captured, info.Length, r.w.opts.SnapLen)
	if r.nStaged == maxStaged || captured < 0 {
		return nil
	}
	n := uint64(recordLen+captured+align-1) &^ (align - 1)
	at := r.next
	if place := at % uint64(len(r.data)); place+n > uint64(len(r.data)) {
		at += uint64(len(r.data)) - place // a record lies in one piece
	}
	buf := []byte(nil)
	if at+n-r.tail.Load() <= uint64(len(r.data)) {
		r.skipTo(at)
		buf = r.data[at%uint64(len(r.data)):][:n]
		binary.LittleEndian.PutUint32(buf, uint32(n))
		binary.LittleEndian.PutUint32(buf[4:], uint32(captured))
		binary.LittleEndian.PutUint32(buf[8:], uint32(info.Length))
		binary.LittleEndian.PutUint32(buf[12:], r.missed)
		binary.LittleEndian.PutUint64(buf[16:], uint64(info.Time.UnixNano()))
		binary.LittleEndian.PutUint16(buf[24:], info.Size)
		buf[26], buf[27] = byte(info.Direction), byte(info.Mark)
		r.next, r.missed = at+n, 0
	} else {
		r.missed++
	}
	r.staged[r.nStaged], r.lostAt[r.nStaged] = r.next, r.missed
	r.nStaged++
	if buf == nil {
		return nil
	}
	return buf[recordLen : recordLen+captured]
}

// skipTo marks the rest of the ring before a record that begins at the ring's start.
func (r *Ring) skipTo(at uint64) {
	if at != r.next {
		binary.LittleEndian.PutUint32(r.data[r.next%uint64(len(r.data)):], 0)
	}
}

// Commit says that the first n of the staged frames passed. The others are forgotten: they will be staged again when they pass.
func (r *Ring) Commit(n int) {
	n = min(n, r.nStaged)
	if n > 0 {
		r.next, r.missed = r.staged[n-1], r.lostAt[n-1]
		lost := uint64(0)
		for i, before := 0, r.head.Load(); i < n; i++ {
			if r.staged[i] == before {
				lost++
			}
			before = r.staged[i]
		}
		if lost > 0 {
			r.lost.Add(lost)
		}
		r.head.Store(r.next)
		select {
		case r.w.wake <- struct{}{}:
		default:
		}
	} else if r.nStaged > 0 {
		r.next, r.missed = r.head.Load(), r.carried
	}
	r.carried, r.nStaged = r.missed, 0
}

// Lost is how many frames that passed were not captured. It is safe from any goroutine.
func (r *Ring) Lost() uint64 { return r.lost.Load() }

// Close gives the ring back; what was committed is still written. The owner does not use it afterwards.
func (r *Ring) Close() { r.w.remove(r) }

// take hands all published frames to f, whose bytes are valid until it returns, and says whether there were any. It belongs to the
// Writer's goroutine.
func (r *Ring) take(f func(info Info, lost uint32, frame []byte)) bool {
	tail, head := r.tail.Load(), r.head.Load()
	if tail == head {
		return false
	}
	for tail != head {
		place := tail % uint64(len(r.data))
		buf := r.data[place:]
		n := uint64(binary.LittleEndian.Uint32(buf))
		if n == 0 {
			tail += uint64(len(r.data)) - place
			continue
		}
		captured := int(binary.LittleEndian.Uint32(buf[4:]))
		f(Info{
			Time: time.Unix(0, int64(binary.LittleEndian.Uint64(buf[16:]))), Direction: Direction(buf[26]),
			Length: int(binary.LittleEndian.Uint32(buf[8:])), Mark: Mark(buf[27]), Size: binary.LittleEndian.Uint16(buf[24:]),
		}, binary.LittleEndian.Uint32(buf[12:]), buf[recordLen:recordLen+captured])
		tail += n
		r.tail.Store(tail)
	}
	return true
}
