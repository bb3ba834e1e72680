package vswitch

import (
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// Sizes of the table of stations. A station can be in one set only, which one nobody outside can tell.
const (
	tableSize = 1 << 13
	setSize   = 16
	numSets   = tableSize / setSize

	// guestStations and uplinkStations are how many stations a port may have.
	guestStations  = 128
	uplinkStations = tableSize / 2
)

// Indexes of ports in the table.
const (
	nobody     = 0 // the entry is free
	left       = 1 // the station's port was removed
	firstIndex = 2
	maxIndex   = 2048
)

const (
	// refreshes is how many times within the ageing time a station that keeps sending is written down, at most.
	refreshes = 16
	// sweepEvery is the least number of milliseconds between two searches for stations that aged out.
	sweepEvery = 1000
)

// table says behind which port a station is. All methods are safe for concurrent use and free of locks. Times are milliseconds of the
// switch's clock.
type table struct {
	seed    uint64
	ageing  atomic.Int64
	swept   atomic.Int64
	owners  [maxIndex]owner
	entries [numSets][setSize]entry
}

// entry is a station: its address << 16 | index of its port, and when it was last heard of.
type entry struct {
	word atomic.Uint64
	seen atomic.Int64
}

// owner is a port's share of the table.
type owner struct {
	stations atomic.Int32
	limit    atomic.Int32
}

// load is how much of its share a port uses, as a fraction of 2^16.
func (o *owner) load() int64 { return int64(o.stations.Load()) << 16 / int64(max(o.limit.Load(), 1)) }

func newTable(ageing time.Duration) *table {
	t := &table{seed: rand.Uint64()}
	t.ageing.Store(ageing.Milliseconds())
	t.owners[left].limit.Store(1) // what nobody owns gives way first
	return t
}

func (t *table) set(mac uint64) *[setSize]entry { return &t.entries[mix(mac, t.seed)%numSets] }

// find returns the index of the port behind which the station is, nobody if that is not known.
func (t *table) find(mac uint64, now int64) (index uint16) {
	set := t.set(mac)
	for i := range set {
		if word := set[i].word.Load(); word>>16 == mac {
			if now-set[i].seen.Load() >= t.ageing.Load() {
				return nobody
			}
			return uint16(word)
		}
	}
	return nobody
}

// learn notes that the station is behind the port, if the port may have another one and there is room.
func (t *table) learn(mac uint64, index uint16, now int64) {
	set := t.set(mac)
	for i := range set {
		e := &set[i]
		word := e.word.Load()
		if word>>16 != mac {
			continue
		}
		if uint16(word) != index {
			if t.mayAdd(index, now) {
				t.replace(e, word, mac, index, now)
			}
		} else if now-e.seen.Load() >= t.ageing.Load()/refreshes {
			e.seen.Store(now)
		}
		return
	}
	if t.mayAdd(index, now) {
		t.insert(set, mac, index, now)
	}
}

// mayAdd says whether the port's share has room for another station.
func (t *table) mayAdd(index uint16, now int64) bool {
	o := &t.owners[index]
	if index == left || o.stations.Load() < o.limit.Load() {
		return true
	}
	t.sweep(now)
	return o.stations.Load() < o.limit.Load()
}

// insert puts a station into a free or outlived entry, or in place of one of the port that uses most of its share if that is more than
// this port does.
func (t *table) insert(set *[setSize]entry, mac uint64, index uint16, now int64) {
	var victim *entry
	var old uint64
	worst := t.owners[index].load()
	ageing := t.ageing.Load()
	for i := range set {
		e := &set[i]
		word := e.word.Load()
		if word == 0 || now-e.seen.Load() >= ageing {
			victim, old = e, word
			break
		}
		if l := t.owners[uint16(word)].load(); l > worst {
			victim, old, worst = e, word, l
		}
	}
	if victim != nil {
		t.replace(victim, old, mac, index, now)
	}
}

// replace makes an entry that still is old one of the station. If another worker was faster, the next frame tries again.
func (t *table) replace(e *entry, old, mac uint64, index uint16, now int64) {
	if !e.word.CompareAndSwap(old, mac<<16|uint64(index)) {
		return
	}
	e.seen.Store(now)
	t.owners[index].stations.Add(1)
	if old != 0 {
		t.owners[uint16(old)].stations.Add(-1)
	}
}

// sweep frees the entries of stations that aged out, once a second at most.
func (t *table) sweep(now int64) {
	last := t.swept.Load()
	if now-last < sweepEvery || !t.swept.CompareAndSwap(last, now) {
		return
	}
	ageing := t.ageing.Load()
	t.each(func(e *entry, word uint64) {
		if now-e.seen.Load() >= ageing && e.word.CompareAndSwap(word, 0) {
			t.owners[uint16(word)].stations.Add(-1)
		}
	})
}

// admit prepares the share of a port that was added.
func (t *table) admit(index uint16, limit int32) { t.owners[index].limit.Store(limit) }

// retire hands the stations of a port that was removed, and sends no more, to nobody: their frames must not be flooded because of that.
func (t *table) retire(index uint16) {
	t.owners[index].limit.Store(0)
	t.each(func(e *entry, word uint64) {
		if uint16(word) == index && e.word.CompareAndSwap(word, word&^0xffff|left) {
			t.owners[index].stations.Add(-1)
			t.owners[left].stations.Add(1)
		}
	})
}

// count is the number of stations that are known.
func (t *table) count(now int64) (n int) {
	ageing := t.ageing.Load()
	t.each(func(e *entry, _ uint64) {
		if now-e.seen.Load() < ageing {
			n++
		}
	})
	return n
}

// each visits the entries in use.
func (t *table) each(visit func(e *entry, word uint64)) {
	for i := range t.entries {
		for j := range t.entries[i] {
			e := &t.entries[i][j]
			if word := e.word.Load(); word != 0 {
				visit(e, word)
			}
		}
	}
}
