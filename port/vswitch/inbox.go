package vswitch

import (
	"sync/atomic"

	"github.com/vhostd/vhostd/internal/bell"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/internal/waiting"
	"github.com/vhostd/vhostd/virtio"
)

// inbox is a bounded queue of packets with many producers and one consumer.
//
// A producer claims a run of slots by moving tail, fills them and publishes the run in its first slot. The consumer follows from run
// to run and stores its position once a batch, which is how producers see room. A producer that is held up between claim and
// publication hides what comes behind it until it goes on, which takes as long as a few copies unless its thread loses the CPU.
//
// Once closed, an inbox takes nothing, and whoever published a run meanwhile empties it: the last one leaves nothing behind.
type inbox struct {
	slots   []slot
	mask    uint64
	account *waiting.Account
	arena   *pagemem.Arena
	lost    *atomic.Uint64 // counts what is released because the inbox was closed

	_         [64]byte
	tail      atomic.Uint64 // next position to claim, times 2, plus closedBit; by producers
	_         [64]byte
	head      atomic.Uint64 // next position to consume, stored by the consumer
	bell.Bell               // on the same line: both are the consumer's
	_         [64]byte

	shares [sources]atomic.Int32 // packets in the inbox by source

	known  uint64        // the consumer's: positions before it are published
	sweeps atomic.Uint32 // calls of sweep since the one that is at work began
	spare  [1]packet.Packet
}

const closedBit = 1

// What a source may hold of an inbox: shareFactor times as many packets as are free, so that one which floods leaves a quarter to the
// others, a second one a quarter of that, and a single sender still finds room for bursts (dynamic thresholds, as in Budget). Sources are
// ports; where there are more than sources of them, some share a share.
const (
	sources     = 64
	shareFactor = 3
)

// slot is one packet, laid out so that the common one takes a single cache line: packet.Packet plus the word that publishes it.
type slot struct {
	word  atomic.Uint64 // (position + 1) << runBits | length of the run that starts here
	hdr   virtio.NetHdr
	len   uint32
	nfrag uint8
	src   uint8
	_     [6]byte
	frags [packet.MaxFrags]packet.Frag
}

// runBits hold a run of up to port.MaxBatch packets.
const runBits = 7

const _ = uint(1<<runBits - 1 - port.MaxBatch)

func (s *slot) put(p *packet.Packet, src uint8) {
	s.hdr, s.len, s.nfrag, s.src = p.Hdr, p.Len, p.NFrag, src
	copy(s.frags[:p.NFrag], p.Frags[:p.NFrag])
}

func (s *slot) take(p *packet.Packet) {
	p.Hdr, p.Len, p.NFrag, p.Flags = s.hdr, s.len, s.nfrag, 0
	copy(p.Frags[:s.nfrag], s.frags[:s.nfrag])
}

// newInbox makes an inbox for size packets, a power of two.
func newInbox(size int, a *waiting.Account, arena *pagemem.Arena, lost *atomic.Uint64) (*inbox, error) {
	b := &inbox{slots: make([]slot, size), mask: uint64(size - 1), account: a, arena: arena, lost: lost}
	if err := b.Open(); err != nil {
		return nil, err
	}
	return b, nil
}

// room is about how many more packets a source may put in. Any worker.
func (b *inbox) room(src uint8) int {
	free := len(b.slots) - b.length()
	return max(0, (shareFactor*free-int(b.shares[src].Load()))/(shareFactor+1))
}

// push takes over the first n of at most port.MaxBatch packets, which it does not change. closed says that it never takes any again.
// Any worker; src is where they come from and by the caller's identity.
func (b *inbox) push(pkts []packet.Packet, src uint8, by pagemem.OwnerID) (n int, closed bool) {
	var tail uint64
	for {
		tail = b.tail.Load()
		if tail&closedBit != 0 {
			return 0, true
		}
		// A stale tail makes room meaningless, but then the swap fails.
		room := int64(len(b.slots)) - int64(tail>>1-b.head.Load())
		if n = int(min(int64(len(pkts)), room)); n <= 0 {
			return 0, false
		}
		if b.tail.CompareAndSwap(tail, tail+2*uint64(n)) {
			break
		}
	}
	at := tail >> 1
	cost := int64(0)
	for i := range pkts[:n] {
		cost += waiting.CostOf(&pkts[i])
		b.slots[(at+uint64(i))&b.mask].put(&pkts[i], src)
	}
	b.account.Charge(cost)
	b.shares[src].Add(int32(n))
	// ORDER: the run's slots and everything the packets refer to before this store; pairs with the load in follow.
	b.slots[at&b.mask].word.Store((at+1)<<runBits | uint64(n))
	if b.tail.Load()&closedBit != 0 {
		b.sweep(by)
		return n, false
	}
	b.Ring()
	return n, false
}

// follow looks for the run that starts at known. Consumer only.
func (b *inbox) follow() bool {
	// ORDER: this load before those of the run's slots; pairs with the store in push.
	word := b.slots[b.known&b.mask].word.Load()
	if word>>runBits != b.known+1 {
		return false
	}
	b.known += word & (1<<runBits - 1)
	return true
}

// empty says that there is nothing to pop now. Consumer only.
func (b *inbox) empty() bool { return b.head.Load() == b.known && !b.follow() }

// pop moves up to len(pkts) packets. Consumer only.
func (b *inbox) pop(pkts []packet.Packet) (n int) {
	head := b.head.Load()
	cost := int64(0)
	src, run := uint8(0), 0 // packets of one source in a row
	for n < len(pkts) && (head+uint64(n) != b.known || b.follow()) {
		s := &b.slots[(head+uint64(n))&b.mask]
		s.take(&pkts[n])
		cost += waiting.CostOf(&pkts[n])
		if s.src != src {
			b.shares[src].Add(int32(-run))
			src, run = s.src, 0
		}
		run++
		n++
	}
	if n > 0 {
		// ORDER: the loads of the slots before this store; pairs with the load of head in push.
		b.head.Store(head + uint64(n))
		b.account.Charge(-cost)
		b.shares[src].Add(int32(-run))
	}
	return n
}

// length is about how many packets are in the inbox. Any goroutine.
func (b *inbox) length() int { return int(b.tail.Load()>>1 - b.head.Load()) }

// close lets no more packets in and releases those that are there. The consumer calls it, and pops no more.
func (b *inbox) close(by pagemem.OwnerID) error {
	// ORDER: the bit before the look in sweep; pairs with publication before the load of tail in push.
	b.tail.Or(closedBit)
	b.sweep(by)
	return b.Bell.Close()
}

// sweep releases what is published in a closed inbox. Of several callers one works and looks again for the others.
func (b *inbox) sweep(by pagemem.OwnerID) {
	if b.sweeps.Add(1) != 1 {
		return
	}
	for {
		calls := b.sweeps.Load()
		for b.pop(b.spare[:]) > 0 {
			packet.Release(b.arena, b.spare[:], by)
			b.lost.Add(1)
		}
		if b.sweeps.CompareAndSwap(calls, 0) {
			return
		}
	}
}
