package vhostuser_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// sharing is a session that has acknowledged everything and has memory.
func sharing(t *testing.T, rings int) (*bench, *frontend.Memory) {
	t.Helper()
	b := newBench(t, newDevice(rings)).negotiate()
	mem := newMemory(t, 8<<20)
	b.shareMemory(mem)
	return b, mem
}

// inflightOf asks for a region of queues and gives it back.
func (b *bench) inflightOf(t *testing.T, queues, size uint16) frontend.Inflight {
	t.Helper()
	in, err := b.GetInflightFD(queues, size)
	b.must(err)
	t.Cleanup(func() { b.must(in.Close()) })
	return in
}

// The region is a memfd that nobody can resize, and its parts reach the rings.
func TestInflightRegion(t *testing.T) {
	b, mem := sharing(t, 4)
	in := b.inflightOf(t, 4, 256)
	if stride := virtqueue.InflightBytes(256, false); in.Size != 4*stride || in.Offset != 0 || in.Queues != 4 || in.QueueSize != 256 || stride%64 != 0 {
		t.Errorf("region %+v, %d bytes for each queue", in, stride)
	}
	if err := unix.Ftruncate(in.FD, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("the region can be truncated: %v", err)
	}
	if err := unix.Ftruncate(in.FD, 1<<20); !errors.Is(err, unix.EPERM) {
		t.Errorf("the region can grow: %v", err)
	}
	b.must(b.SetInflightFD(in))
	b.must(b.SetVringEnable(1, true))
	b.startRing(mem, 1, 0)
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		part := d.running[1].Inflight
		if part == nil || part.Entries != 256 || !part.Mem.Owns(part.Host) {
			t.Fatalf("part of ring 1: %+v", part)
		}
		if host, _ := part.Mem.Lookup(virtqueue.InflightBytes(256, false), 1); host != part.Host {
			t.Errorf("ring 1 is at %#x, want %#x", part.Host, host)
		}
	})
	b.NeedReply = true
	if err := b.SetInflightFD(in); !isRefused(err) {
		t.Errorf("another region under a running ring: %v", err)
	}
	// A stop in order ends what the region says.
	b.NeedReply = false
	version := func() uint16 {
		var v [2]byte
		_, err := unix.Pread(in.FD, v[:], int64(virtqueue.InflightBytes(256, false))+8)
		b.must(err)
		return binary.LittleEndian.Uint16(v[:])
	}
	_, err := unix.Pwrite(in.FD, []byte{1}, int64(virtqueue.InflightBytes(256, false))+8)
	b.must(err)
	_, err = b.GetVringBase(1)
	b.must(err)
	b.must(b.Sync())
	if v := version(); v != 0 {
		t.Errorf("version %d after the stop", v)
	}
	b.checkDevice()
}

// A3: regions pile up neither as mappings nor as descriptors.
func TestA3_InflightRegionsStayFlat(t *testing.T) {
	b, _ := sharing(t, 4)
	fds, maps := 0, 0
	for i := range 3000 {
		in, err := b.GetInflightFD(4, 1024)
		b.must(err)
		b.must(b.SetInflightFD(in))
		b.must(in.Close())
		if i == 10 {
			b.must(b.Sync())
			fds, maps = openFDs(), mappings(t)
		}
	}
	b.must(b.Sync())
	if n, m := openFDs(), mappings(t); n > fds || m > maps {
		t.Errorf("%d descriptors and %d mappings, %d and %d before", n, m, fds, maps)
	}
	b.checkDevice()
}

// A5, A13: descriptions of a region that do not fit its file or the rings, also beyond 32 and 64 bits.
func TestA5_A13_InflightDescriptions(t *testing.T) {
	b, _ := sharing(t, 2)
	tooMany := uint16(vhostuser.RingLimit(2) + 1)
	b.NeedReply = true
	good := b.inflightOf(t, 4, 256)
	for _, d := range []vhostuser.InflightDesc{
		{},
		{Size: good.Size, Queues: 0, QueueSize: 256},
		{Size: good.Size, Queues: tooMany, QueueSize: 1},
		{Size: 1 << 40, Queues: 65535, QueueSize: 32768},
		{Size: good.Size, Queues: 4, QueueSize: 0},
		{Size: good.Size, Queues: 4, QueueSize: 260},
		{Size: 1 << 40, Queues: 4, QueueSize: 32769},
		{Size: good.Size - 1, Queues: 4, QueueSize: 256},
		{Size: good.Size, Offset: 64, Queues: 4, QueueSize: 256},
		{Size: good.Size, Offset: 8, Queues: 4, QueueSize: 255},
		{Size: good.Size, Offset: 1 << 32, Queues: 4, QueueSize: 256},
		{Size: good.Size, Offset: ^uint64(0) &^ 63, Queues: 4, QueueSize: 256},
		{Size: ^uint64(0), Offset: 1 << 63, Queues: 4, QueueSize: 256},
		{Size: 1 << 32, Offset: 0, Queues: 4, QueueSize: 32768},
	} {
		if err := b.SetInflightFD(frontend.Inflight{InflightDesc: d, FD: good.FD}); !isRefused(err) {
			t.Errorf("%+v: %v", d, err)
		}
	}
	b.must(b.SetInflightFD(good))
	// What the mapping needs counts, not what the front-end says of its file.
	good.Size = 1 << 40
	b.must(b.SetInflightFD(good))
	for _, d := range [][2]uint16{{0, 256}, {tooMany, 256}, {65535, 65535}, {1, 0}, {1, 32769}} {
		b, _ := sharing(t, 2)
		if in, err := b.GetInflightFD(d[0], d[1]); err == nil {
			t.Errorf("a region for %d queues of %d: %+v", d[0], d[1], in)
		}
		_ = b.wait()
	}
}

// A6: descriptors that do not belong to the messages, and files that are no regions.
func TestA6_InflightDescriptors(t *testing.T) {
	b, _ := sharing(t, 2)
	b.NeedReply = true
	good := b.inflightOf(t, 2, 64)
	payload := good.Append(nil)
	fds := openFDs()
	for name, with := range map[string][]int{
		"none": nil, "two": {good.FD, good.FD}, "eventfd": {eventFD(t)}, "nine": {0, 0, 0, 0, 0, 0, 0, 0, 0},
	} {
		if err := b.DoAck(vhostuser.ReqSetInflightFD, payload, with...); !isRefused(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b.must(b.Sync())
	if n := openFDs(); n > fds+1 {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
	b.checkDevice()
}

// A7, B26: a region made for small rings and a large one.
func TestA7_B26_RingLargerThanItsRegion(t *testing.T) {
	b, mem := sharing(t, 2)
	b.NeedReply = true
	small := b.inflightOf(t, 1, 64)
	b.must(b.SetInflightFD(small))
	if err := b.SetVringNum(0, 128); !isRefused(err) {
		t.Errorf("ring of 128 with a region for 64: %v", err)
	}
	b.must(b.SetVringNum(0, 64))
	b.must(b.SetVringNum(1, 1024)) // has no part of the region
	b.NeedReply = false
	b.startRing(mem, 1, 0)
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		if part := d.running[1].Inflight; part != nil {
			t.Errorf("ring 1 has the part %+v", part)
		}
	})
	large, _ := sharing(t, 2)
	large.NeedReply = true
	large.must(large.SetVringNum(0, 128))
	if err := large.SetInflightFD(small); !isRefused(err) {
		t.Errorf("region for 64 behind a ring of 128: %v", err)
	}
}

// memStore is a RingStore in memory that says what became of it.
type memStore struct {
	ids   map[int][16]uint64
	words map[int][]uint64
	stops []int
	same  []bool
}

func (s *memStore) Start(i int, id [16]uint64, n int) ([]uint64, bool, error) {
	if n > 1<<15 {
		return nil, false, fmt.Errorf("%d words", n)
	}
	known, ok := s.ids[i]
	same := ok && known == id
	if !same {
		s.words[i] = make([]uint64, n)
	}
	s.ids[i] = id
	s.same = append(s.same, same)
	return s.words[i], same, nil
}

func (s *memStore) Stop(i int) {
	delete(s.ids, i)
	s.stops = append(s.stops, i)
}

// A record wins over SET_VRING_BASE only in the very set-up that it was written in, and not once the front-end was told where the
// ring stopped.
func TestRecordRule(t *testing.T) {
	store := &memStore{ids: map[int][16]uint64{}, words: map[int][]uint64{}}
	mem, other := newMemory(t, 8<<20), newMemory(t, 8<<20)
	const base = 0x80058005
	life := func(m *frontend.Memory, base uint32, size uint32, move uint64, end func(*bench)) bool {
		dev := newDevice(4)
		dev.features |= virtio.FRingPacked
		b := newBench(t, dev, func(o *vhostuser.Options) { o.Rings = store }).negotiate()
		b.shareMemory(m)
		a := ringAddr(m, 0)
		a.Desc += move
		b.must(b.SetVringNum(0, size))
		b.must(b.SetVringBase(0, base))
		b.must(b.SetVringAddr(a))
		b.must(b.SetVringKick(0, eventFD(t)))
		b.must(b.Sync())
		var resume bool
		b.dev.peek(func(d *fakeDevice) { resume = d.running[0].Record != nil && d.running[0].Record.Resume })
		if end != nil {
			end(b)
		}
		b.Conn.Close()
		b.must(b.wait())
		return resume
	}
	expect := func(what string, got, want bool) {
		t.Helper()
		if got != want {
			t.Errorf("%s: resumed %v, want %v", what, got, want)
		}
	}
	expect("first", life(mem, base, 100, 0, nil), false)
	expect("the same", life(mem, base, 100, 0, nil), true)
	expect("another base", life(mem, base+1<<16, 100, 0, nil), false)
	expect("back", life(mem, base, 100, 0, nil), false)
	expect("another size", life(mem, base, 101, 0, nil), false)
	expect("another address", life(mem, base, 101, 16, nil), false)
	expect("another file", life(other, base, 101, 16, nil), false)
	expect("that file again", life(other, base, 101, 16, nil), true)
	stop := func(b *bench) {
		_, err := b.GetVringBase(0)
		b.must(err)
		b.must(b.Sync())
	}
	expect("before a stop", life(mem, base, 100, 0, stop), false)
	expect("after a stop", life(mem, base, 100, 0, nil), false)
	expect("virtio-user", life(mem, 0x8000, 100, 0, nil), false)
	expect("virtio-user, which begins its rings anew", life(mem, 0x8000, 100, 0, nil), false)
	if len(store.stops) != 1 {
		t.Errorf("stops %v, want one", store.stops)
	}
}
