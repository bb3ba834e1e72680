package vhostuser_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// ringModel is what a ring should be, in the plainest words.
type ringModel struct {
	size             uint32
	place            int // -1: no address
	kick             bool
	base             uint32
	started, enabled bool
}

// sessionModel predicts for each message whether it is acknowledged, and which
// rings run afterwards. Rings 0 and 1 may run, 2 and 3 lack VIRTIO_NET_F_MQ.
type sessionModel struct {
	features virtio.Features
	memory   int // 0: none, 1: with the rings, 2: without them
	rings    [4]ringModel
}

func (m *sessionModel) stop(r *ringModel) { r.started, r.kick = false, false }

// settle stops a disabled ring that is to be changed; false: it runs.
func (m *sessionModel) settle(r *ringModel) bool {
	if r.started && r.enabled {
		return false
	}
	if r.started {
		m.stop(r)
	}
	return true
}

// start starts ring i if it is complete; false: it cannot be found in memory.
func (m *sessionModel) start(i int) bool {
	r := &m.rings[i]
	if i > 1 || r.started || m.features == 0 || m.memory == 0 || r.size == 0 || r.place < 0 || !r.kick {
		return true
	}
	r.started = m.memory == 1
	return r.started
}

func (m *sessionModel) startAll() {
	for i := range m.rings {
		m.start(i)
	}
}

func (m *sessionModel) setFeatures(f virtio.Features) bool {
	if f == m.features {
		return true
	}
	for i := range m.rings {
		if m.rings[i].started && m.rings[i].enabled {
			return false
		}
	}
	for i := range m.rings {
		m.settle(&m.rings[i])
	}
	m.features = f
	m.startAll()
	return true
}

func (m *sessionModel) setNum(i int, n uint32) bool {
	r := &m.rings[i]
	if n == 3 {
		return false
	}
	if n == r.size {
		return true
	}
	if !m.settle(r) {
		return false
	}
	old := r.size
	r.size = n
	if !m.start(i) {
		r.size = old
		return false
	}
	return true
}

func (m *sessionModel) setAddr(i, place int) bool {
	r := &m.rings[i]
	if r.started && place == r.place {
		return true
	}
	if m.memory == 2 && r.size != 0 || !m.settle(r) {
		return false
	}
	r.place = place
	return m.start(i)
}

func (m *sessionModel) setBase(i int, base uint32) bool {
	if !m.settle(&m.rings[i]) {
		return false
	}
	m.rings[i].base = base
	return true
}

func (m *sessionModel) setKick(i int) bool {
	r := &m.rings[i]
	had := r.kick
	r.kick = true
	if !m.start(i) {
		r.kick = had
		return false
	}
	return true
}

// TestModel compares random conversations with the model.
func TestModel(t *testing.T) {
	with, without := newMemory(t, 1<<20), newMemory(t, 4096)
	without.Regions[0].UVA += 1 << 40
	kick := eventFD(t)
	rapid.Check(t, func(rt *rapid.T) {
		b := newBench(t, newDevice(2))
		defer func() { b.Conn.Close(); b.must(b.wait()) }()
		b.NeedReply = true
		b.must(b.SetProtocolFeatures(vhostuser.ProtoReplyAck))
		m := &sessionModel{}
		for i := range m.rings {
			m.rings[i].place = -1
		}
		for range rapid.IntRange(5, 60).Draw(rt, "messages") {
			step(rt, b, m, [...]*frontend.Memory{nil, with, without}, kick)
		}
	})
}

// step sends one random message and compares acknowledgement and running rings.
func step(rt *rapid.T, b *bench, m *sessionModel, memories [3]*frontend.Memory, kick int) {
	i := rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(rt, "ring")
	r := &m.rings[i]
	var err error
	var want bool
	op := rapid.SampledFrom([]string{"features", "memory", "num", "num", "addr", "addr", "base", "kick", "kick", "enable", "get base"}).Draw(rt, "op")
	switch op {
	case "features":
		f := bit30 | rapid.SampledFrom([]virtio.Features{virtio.FVersion1, virtio.FVersion1 | virtio.FNetCSum}).Draw(rt, "features")
		err, want = b.SetFeatures(f), m.setFeatures(f)
	case "memory":
		m.memory = rapid.SampledFrom([]int{1, 1, 2}).Draw(rt, "memory")
		specs, fds := memories[m.memory].Table()
		err, want = b.SetMemTable(specs, fds), true
		m.startAll()
	case "num":
		n := rapid.SampledFrom([]uint32{3, 64, 256, 256}).Draw(rt, "size")
		err, want = b.SetVringNum(i, n), m.setNum(i, n)
	case "addr":
		place := rapid.SampledFrom([]int{i, i, i + 8}).Draw(rt, "place")
		a := ringAddr(memories[1], place)
		a.Index = uint32(i)
		err, want = b.SetVringAddr(a), m.setAddr(i, place)
	case "base":
		base := rapid.Uint32Range(0, 0xffff).Draw(rt, "base")
		err, want = b.SetVringBase(i, base), m.setBase(i, base)
	case "kick":
		err, want = b.SetVringKick(i, kick), m.setKick(i)
	case "enable":
		on := rapid.Bool().Draw(rt, "on")
		err, want = b.SetVringEnable(i, on), true
		r.enabled = on
	case "get base":
		var base uint32
		base, err = b.GetVringBase(i)
		want = true
		if base != r.base {
			rt.Fatalf("ring %d: position %d, want %d", i, base, r.base)
		}
		m.stop(r)
	}
	if isRefused(err) == want || err != nil && !isRefused(err) {
		rt.Fatalf("%s of ring %d: %v, model accepts: %v", op, i, err, want)
	}
	b.dev.peek(func(d *fakeDevice) {
		for i, r := range m.rings {
			c, running := d.running[i]
			if running != r.started || running && (uint32(c.Size) != r.size || d.enabled[i] != r.enabled || d.parked[i] != (m.memory == 2)) {
				rt.Fatalf("after %s: ring %d is %+v (running %v), model %+v", op, i, c, running, r)
			}
		}
	})
	if f := b.dev.faults.Load(); f != nil {
		rt.Fatal(*f)
	}
}
