package virtqueue

import "fmt"

// Record is where a packed ring keeps its position outside of guest memory, so that
// the next life of the ring can go on where this one was killed at any instruction.
//
// Words is memory of the caller that outlives the process, RecordWords long. The
// first word is the state, the others are the ring's slots: with them a batch of
// which only a part was written can be written to its end. A word is stored whole;
// the order of the stores is the program's, which is all that the end of a process
// leaves to be observed.
type Record struct {
	Words []uint64
	// Resume asks NewPacked to go on from what Words say, which is of a ring with
	// the same size, areas and features; without it, Words are begun anew.
	Resume bool
	// Resumed is NewPacked's answer: the ring goes on from Words. Otherwise Refused
	// says why it cannot.
	Resumed bool
	Refused error
}

// RecordWords is the length of a Record's Words for a ring of size descriptors.
func RecordWords(size int) int { return 1 + size }

// state is the first word of a record: the position of the oldest chain that the
// driver was not told of, how many chains from there on are being published (0:
// none), and the place of the last used descriptor that was written, if any.
type state uint64

const (
	stateCount = 16 // shift of the number of chains
	stateLast  = 32 // shift of the last used descriptor
	stateHas   = 1 << 48
	stateValid = 1 << 63
)

func (s state) at() place   { return placeOf(uint16(s)) }
func (s state) chains() int { return int(uint16(s >> stateCount)) }
func (s state) last() (at place, ok bool) {
	return placeOf(uint16(s >> stateLast)), s&stateHas != 0
}

func placeOf(word uint16) place { return place{word & 0x7fff, word >> 15} }

// publishing is s while n chains are made visible.
func (s state) publishing(n int) state { return s | state(n)<<stateCount }

// settledAt is the state after a batch that began at from and ends before at.
func settledAt(at, from place) state {
	return stateValid | state(at.word()) | state(from.word())<<stateLast | stateHas
}

// adopt makes rec the ring's record, and goes on from it if it can.
func (q *Packed) adopt(rec *Record) error {
	if len(rec.Words) != RecordWords(int(q.size)) {
		return fmt.Errorf("virtqueue: record of %d words for a packed ring of %d, need %d", len(rec.Words), q.size, RecordWords(int(q.size)))
	}
	rec.Resumed, rec.Refused = false, nil
	q.record, q.slots = recordOf(rec.Words), rec.Words[1:]
	if rec.Resume {
		if rec.Refused = q.resume(state(rec.Words[0])); rec.Refused == nil {
			rec.Resumed = true
			return nil
		}
	}
	clear(q.slots)
	return nil
}

func (q *Packed) goTo(at place) { q.peeked, q.consumed, q.published = at, at, at }

// resume goes on from a record. A batch of which the driver has seen nothing is
// written once more and becomes visible: its frames are where they belong. What the
// record says is checked against the ring, for a driver may have begun it anew
// while nobody was there.
func (q *Packed) resume(s state) error {
	at, n := s.at(), s.chains()
	last, has := s.last()
	if s&stateValid == 0 || at.idx >= q.size || last.idx >= q.size || n > int(q.size) {
		return fmt.Errorf("virtqueue: record %#x makes no sense for a ring of %d", uint64(s), q.size)
	}
	end, newest := 0, 0
	for i, idx := 0, int(at.idx); i < n; i++ {
		newest = idx
		descs := int(q.slots[idx] >> slotDescs)
		if end += descs; descs == 0 || end > int(q.size) {
			return fmt.Errorf("virtqueue: record %#x: chain %d of its batch has %d descriptors, %d in all", uint64(s), i, descs, end)
		}
		if idx += descs; idx >= int(q.size) {
			idx -= int(q.size)
		}
	}
	next := at.add(uint16(end), q.size)
	if n > 0 && q.state(at) != at.availFlags() {
		at, last, has, n, end = next, at, true, 0, 0 // the driver has seen the batch
	}
	if !q.plausible(at, end, last, has) {
		return fmt.Errorf("virtqueue: record %#x does not fit what the ring holds: its driver has begun it anew", uint64(s))
	}
	q.goTo(at)
	if n == 0 {
		s = stateValid | state(at.word())
		if has {
			s = settledAt(at, last)
		}
		q.record.store(s)
		return nil
	}
	q.peeked, q.consumed, q.staged, q.newest = next, next, n, uint16(newest)
	q.Publish(0)
	return nil
}

// state is the AVAIL and USED flags of a descriptor.
func (q *Packed) state(at place) uint16 { return q.ring.meta(int(at.idx)).flags() & packedState }

// plausible reports whether the ring can be one whose device stands at the given
// place, with half-written used descriptors in the batch of descs behind it, and
// wrote its last used descriptor at last. For a whole lap behind the batch nothing can
// be used yet.
func (q *Packed) plausible(at place, descs int, last place, has bool) bool {
	behind := at.add(uint16(descs), q.size)
	for range int(q.size) - descs {
		if q.state(behind) == behind.usedFlags() {
			return false
		}
		behind = behind.add(1, q.size)
	}
	if into := (int(last.idx) + int(q.size) - int(at.idx)) % int(q.size); !has || into < descs {
		return true // the driver has used the descriptor again, for the batch
	}
	nextLap := place{last.idx, last.wrap ^ 1}
	switch q.state(last) {
	case last.usedFlags():
		// One that stands for a batch has the id of another chain.
		return q.oneUsed || q.ring.meta(int(last.idx)).id() == packedMeta(q.slots[last.idx]).id()
	case nextLap.availFlags():
		// Then the driver has filled everything before it, and the place is filled.
		return q.state(at) == at.availFlags()
	}
	return false
}
