package driver_test

import (
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// modelChain is a chain as the model knows it.
type modelChain struct {
	head  uint16
	descs int
	bufs  []driver.Buf
}

// model is a plain device, which reads the ring byte by byte and completes in
// any order, and what the driver must say then.
type model struct {
	q      driver.Queue
	mem    []byte
	layout driver.Layout
	packed bool
	order  bool
	size   int

	staged, published []modelChain
	read              int          // how many of published the device has read
	used              []modelChain // completed and not taken
	lengths           []uint32     // of used
	availAt, usedAt   int          // device's positions: entries, or descriptors without end
	free              int
	tables            int
}

// TestModel plays random actions of driver and device, legal and illegal ones.
func TestModel(t *testing.T) {
	for _, packed := range []bool{false, true} {
		t.Run(map[bool]string{false: "split", true: "packed"}[packed], func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) { playModel(t, rt, packed) })
		})
	}
}

const (
	modelTables = 0x10000 // where indirect tables lie
	modelMemory = 0x20000
)

func playModel(t *testing.T, rt *rapid.T, packed bool) {
	m := &model{packed: packed, order: rapid.Bool().Draw(rt, "in_order"), size: 1 << rapid.IntRange(0, 5).Draw(rt, "size")}
	features := virtio.FRingIndirectDesc
	if m.order {
		features |= virtio.FInOrder
	}
	m.layout = driver.Packed(m.size, 0)
	if packed {
		m.size = max(m.size-1, 1)
		m.layout = driver.PackedFormat(m.size, 0)
	}
	mem, err := unix.Mmap(-1, 0, modelMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	m.mem = mem
	base := addr(mem)
	cfg := driver.Config{
		Size: m.size, Features: features,
		Desc: base + uintptr(m.layout.Desc), Avail: base + uintptr(m.layout.Avail), Used: base + uintptr(m.layout.Used),
	}
	if packed {
		m.q, err = driver.NewPacked(cfg)
	} else {
		m.q, err = driver.New(cfg)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.reset(rt)
	rt.Repeat(map[string]func(*rapid.T){
		"add": m.add, "publish": m.publish, "read": m.readChains, "use": m.use, "take": m.take, "cheat": m.cheat, "": m.check,
	})
}

func (m *model) reset(rt *rapid.T) {
	at := rapid.IntRange(0, 2*m.size-1).Draw(rt, "start")
	if !m.packed {
		at = rapid.SampledFrom([]int{0, 65530}).Draw(rt, "start index")
	}
	m.staged, m.published, m.used, m.lengths = nil, nil, nil, nil
	m.read, m.availAt, m.usedAt, m.free = 0, at, at, m.size
	m.q.Reset(m.word(at))
}

// word is a position as the ring says it.
func (m *model) word(position int) uint16 {
	if m.packed {
		return uint16(position%m.size) | uint16(position/m.size+1)&1<<15
	}
	return uint16(position)
}

func (m *model) add(rt *rapid.T) {
	c := modelChain{descs: rapid.IntRange(1, 4).Draw(rt, "buffers")}
	for range c.descs {
		c.bufs = append(c.bufs, driver.Buf{
			Addr: rapid.Uint64().Draw(rt, "addr"), Len: rapid.Uint32().Draw(rt, "len"), Write: rapid.Bool().Draw(rt, "write"),
		})
	}
	var err error
	switch {
	case rapid.Bool().Draw(rt, "table"):
		at := modelTables + 64*(m.tables%512)
		m.tables++
		c.descs = 1
		c.head, err = m.q.AddIndirect(addr(m.mem)+uintptr(at), uint64(at), c.bufs)
	case c.descs == 1:
		c.head, err = m.q.AddDirect(c.bufs[0])
	default:
		c.head, err = m.q.AddChain(c.bufs)
	}
	if (err == nil) != (c.descs <= m.free) {
		rt.Fatalf("chain of %d descriptors with %d free: %v", c.descs, m.free, err)
	}
	if err == nil {
		m.free -= c.descs
		m.staged = append(m.staged, c)
	}
}

func (m *model) publish(rt *rapid.T) {
	if got := m.q.Publish(); got != len(m.staged) {
		rt.Fatalf("Publish = %d, want %d", got, len(m.staged))
	}
	m.published = append(m.published, m.staged...)
	m.staged = nil
}

// readChains lets the device read what is available and compares.
func (m *model) readChains(rt *rapid.T) {
	for m.available() {
		if m.read == len(m.published) {
			rt.Fatal("the ring shows a chain that was not published")
		}
		want := m.published[m.read]
		m.read++
		got := modelChain{}
		if m.packed {
			got = m.readPacked(rt)
		} else {
			got = m.readSplit()
		}
		if got.head != want.head || got.descs != want.descs || !slices.Equal(got.bufs, want.bufs) {
			rt.Fatalf("the ring shows chain %+v, want %+v", got, want)
		}
	}
	if m.read != len(m.published) {
		rt.Fatalf("the ring shows %d of %d chains", m.read, len(m.published))
	}
}

func (m *model) u16(at uint64) uint16 { return binary.LittleEndian.Uint16(m.mem[at:]) }

func (m *model) available() bool {
	if !m.packed {
		return m.u16(m.layout.Avail+2) != m.word(m.availAt)
	}
	flags := m.u16(m.layout.Desc + 16*uint64(m.availAt%m.size) + 14)
	wrap := m.word(m.availAt)>>15 != 0
	return (flags&driver.DescFAvail != 0) == wrap && (flags&driver.DescFUsed != 0) != wrap
}

// descriptor reads 16 bytes: address, length and the two last fields.
func (m *model) descriptor(at uint64) (b driver.Buf, third, fourth uint16) {
	d := m.mem[at:]
	return driver.Buf{Addr: binary.LittleEndian.Uint64(d), Len: binary.LittleEndian.Uint32(d[8:])}, m.u16(at + 12), m.u16(at + 14)
}

func (m *model) readSplit() (c modelChain) {
	c.head = m.u16(m.layout.Avail + 4 + 2*uint64(m.availAt%m.size))
	m.availAt++
	table, i := m.layout.Desc, c.head
	for c.descs = 1; ; {
		b, flags, next := m.descriptor(table + 16*uint64(i))
		if flags&driver.DescFIndirect != 0 {
			table, i = b.Addr, 0
			continue
		}
		b.Write = flags&driver.DescFWrite != 0
		c.bufs = append(c.bufs, b)
		if flags&driver.DescFNext == 0 {
			return c
		}
		if i = next; table == m.layout.Desc {
			c.descs++
		}
	}
}

func (m *model) readPacked(rt *rapid.T) (c modelChain) {
	for {
		if !m.available() {
			rt.Fatal("a chain whose end is not available")
		}
		b, id, flags := m.descriptor(m.layout.Desc + 16*uint64(m.availAt%m.size))
		m.availAt++
		c.descs++
		if flags&driver.DescFIndirect != 0 {
			for i := range uint64(b.Len / 16) {
				e, _, flags := m.descriptor(b.Addr + 16*i)
				e.Write = flags&driver.DescFWrite != 0
				c.bufs = append(c.bufs, e)
			}
		} else {
			b.Write = flags&driver.DescFWrite != 0
			c.bufs = append(c.bufs, b)
		}
		if c.head = id; flags&driver.DescFNext == 0 {
			return c
		}
	}
}

// use completes chains: any that was read, or with IN_ORDER the oldest ones by one entry.
func (m *model) use(rt *rapid.T) {
	if m.read == 0 {
		return
	}
	n, first := 1, 0
	if m.order {
		n = rapid.IntRange(1, m.read).Draw(rt, "batch")
	} else {
		first = rapid.IntRange(0, m.read-1).Draw(rt, "chain")
	}
	written := rapid.Uint32().Draw(rt, "written")
	chains := m.published[first : first+n]
	m.writeUsed(chains[n-1].head, written, n)
	for i, c := range chains {
		m.used = append(m.used, c)
		m.lengths = append(m.lengths, 0)
		if i == n-1 {
			m.lengths[len(m.lengths)-1] = written
		}
		if m.packed {
			m.usedAt += c.descs
		} else {
			m.usedAt++
		}
	}
	m.published = slices.Delete(slices.Clone(m.published), first, first+n)
	m.read -= n
}

// writeUsed writes one used entry at the device's position, which stands for n chains.
func (m *model) writeUsed(id uint16, written uint32, n int) {
	if m.packed {
		d := m.mem[m.layout.Desc+16*uint64(m.usedAt%m.size):]
		flags := uint16(driver.DescFWrite)
		if m.word(m.usedAt)>>15 != 0 {
			flags |= driver.DescFAvail | driver.DescFUsed
		}
		binary.LittleEndian.PutUint32(d[8:], written)
		binary.LittleEndian.PutUint16(d[12:], id)
		binary.LittleEndian.PutUint16(d[14:], flags)
		return
	}
	e := m.mem[m.layout.Used+4+8*uint64(m.usedAt%m.size):]
	binary.LittleEndian.PutUint32(e, uint32(id))
	binary.LittleEndian.PutUint32(e[4:], written)
	binary.LittleEndian.PutUint16(m.mem[m.layout.Used+2:], m.word(m.usedAt+n))
}

func (m *model) take(rt *rapid.T) {
	n := rapid.IntRange(0, len(m.used)).Draw(rt, "n")
	for i, c := range m.used[:n] {
		head, written, ok := m.q.GetUsed()
		if !ok || head != c.head || written != m.lengths[i] {
			rt.Fatalf("GetUsed = %d, %d bytes, %v, %v, want %d, %d", head, written, ok, m.q.Err(), c.head, m.lengths[i])
		}
		m.free += c.descs
	}
	m.used, m.lengths = m.used[n:], m.lengths[n:]
}

// cheat completes a chain that the driver has not out. The driver may take what came before, then it stops.
func (m *model) cheat(rt *rapid.T) {
	if rapid.IntRange(0, 3).Draw(rt, "whether") != 0 || m.packed && m.usedAt-m.availAt >= m.size {
		return
	}
	id := rapid.Uint16().Draw(rt, "id")
	for _, c := range slices.Concat(m.staged, m.published, m.used) {
		if c.head == id {
			return
		}
	}
	if m.packed && m.availAt == m.usedAt && m.free == 0 {
		return
	}
	m.writeUsed(id, 1, 1)
	for _, c := range m.used {
		if head, _, ok := m.q.GetUsed(); ok && head != c.head {
			rt.Fatalf("GetUsed = %d, want %d, or nothing", head, c.head)
		}
	}
	for range 2 {
		if _, _, ok := m.q.GetUsed(); ok || m.q.Err() == nil || m.q.HasUsed() {
			rt.Fatalf("id %d, which is not outstanding: GetUsed = %v, %v", id, ok, m.q.Err())
		}
	}
	m.reset(rt)
}

func (m *model) check(rt *rapid.T) {
	if n := len(m.staged) + len(m.published) + len(m.used); m.q.Outstanding() != n || m.q.Free() != m.free {
		rt.Fatalf("%d chains outstanding and %d descriptors free, want %d and %d", m.q.Outstanding(), m.q.Free(), n, m.free)
	}
	if m.q.HasUsed() != (len(m.used) > 0) || m.q.Err() != nil {
		rt.Fatalf("HasUsed = %v with %d used, %v", m.q.HasUsed(), len(m.used), m.q.Err())
	}
}
