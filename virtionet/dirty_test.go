package virtionet

import (
	"bytes"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
	"github.com/vhostd/vhostd/worker"
)

// migration is a rig whose guest memory is copied as a migrating front-end does.
type migration struct {
	*rig
	fd    int // the dirty log's file
	log   *guestmem.Log
	image []byte // region 0 as the destination has it
}

const (
	migrationPages  = rigSeam / guestmem.LogPage
	migrationOffset = 5 // of the bitmap in its file
)

// migrate begins logging.
func (r *rig) migrate() *migration {
	m := &migration{rig: r, fd: must(unix.MemfdCreate("dirty-log-test", unix.MFD_CLOEXEC)), image: make([]byte, rigSeam)}
	r.t.Cleanup(func() { unix.Close(m.fd) })
	m.fresh()
	m.logRings()
	copy(m.image, r.mem.Bytes(0, rigSeam))
	return m
}

// logRings lets the device mark the rings, too.
func (m *migration) logRings() {
	l := m.layout()
	for i := range 2 {
		m.logs[i] = vhostuser.RingLog{On: true, Used: m.at[i] + l.Used, Desc: m.at[i] + l.Desc}
		m.dev.SetRingLog(m.index(i), m.logs[i])
	}
}

// fresh gives the device a new log, empty, and returns what the old one held.
func (m *migration) fresh() (old []byte) {
	m.t.Helper()
	fd := must(unix.MemfdCreate("dirty-log-test", unix.MFD_CLOEXEC))
	if err := unix.Ftruncate(fd, migrationOffset+migrationPages/8); err != nil {
		m.t.Fatal(err)
	}
	l := must(guestmem.NewLog(migrationPages/8, migrationOffset, fd))
	m.dev.SetLog(l, -1)
	old = m.marks()
	if err := m.log.Close(); err != nil {
		m.t.Error(err)
	}
	unix.Close(m.fd)
	m.fd, m.log = fd, l
	return old
}

// marks is the bitmap as the front-end reads it.
func (m *migration) marks() []byte {
	b := make([]byte, migrationPages/8)
	_, _ = unix.Pread(m.fd, b, migrationOffset)
	return b
}

func marked(bits []byte, page int) bool { return bits[page/8]>>(page%8)&1 != 0 }

// end stops logging.
func (m *migration) end() {
	m.dev.SetLog(nil, -1)
	if err := m.log.Close(); err != nil {
		m.t.Error(err)
	}
	m.log = nil
}

// differ lists the pages in which the image is not the memory.
func (m *migration) differ() (pages []int) {
	mem := m.mem.Bytes(0, rigSeam)
	const step = 64 * guestmem.LogPage
	for at := 0; at < rigSeam; at += step {
		if bytes.Equal(mem[at:at+step], m.image[at:at+step]) {
			continue
		}
		for p := at; p < at+step; p += guestmem.LogPage {
			if !bytes.Equal(mem[p:p+guestmem.LogPage], m.image[p:p+guestmem.LogPage]) {
				pages = append(pages, p/guestmem.LogPage)
			}
		}
	}
	return pages
}

func (m *migration) copyPage(p int) {
	at := uint64(p) * guestmem.LogPage
	copy(m.image[at:], m.mem.Bytes(at, guestmem.LogPage))
}

// pass lets the pair work on everything there is and copies the pages that are marked.
// What the driver wrote before counts as copied. The worker does nothing else meanwhile.
func (m *migration) pass() (missing []int) {
	m.fresh()
	m.loop.Do(func() {
		for _, p := range m.differ() {
			m.copyPage(p)
		}
		p := m.pair()
		p.emptyTurns = 0
		for p.Run() {
		}
		p.flush()
		p.Arm()
		bits := m.marks()
		for page := range migrationPages {
			if marked(bits, page) {
				m.copyPage(page)
			}
		}
		missing = m.differ()
	})
	return missing
}

// TestMIG03_DirtyPages does random things to both rings, legal and not, with a new log for
// each pass: whatever the device changed in guest memory is marked.
func TestMIG03_DirtyPages(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		features := rapid.SampledFrom([]virtio.Features{baseFeatures, modernSingle, legacyFeatures}).Draw(rt, "features")
		features = rapid.SampledFrom(formats(features)).Draw(rt, "format")
		if rapid.Bool().Draw(rt, "event index") {
			features |= virtio.FRingEventIdx
		}
		p := newFakePort()
		p.piece = rapid.SampledFrom([]int{0, 2000}).Draw(rt, "piece")
		lag := rapid.SampledFrom([]int{0, 5}).Draw(rt, "lag")
		r := newRig(t, p, rigOptions{features: features, size: 64, lag: lag})
		defer r.finishEarly()
		m := r.migrate()
		defer m.end()
		for seed := range rapid.IntRange(1, 15).Draw(rt, "actions") {
			m.action(rt, p, seed)
			if missing := m.pass(); missing != nil {
				rt.Fatalf("pages %v changed without a mark, rings at %#x", missing, r.at)
			}
			for i := range 2 {
				r.used(i)
			}
			p.take()
		}
	})
}

// action does something of the driver's, legal or not, of the network's or of the
// front-end's, which may make the device write at once.
func (m *migration) action(rt *rapid.T, p *fakePort, seed int) {
	ring := rapid.IntRange(0, 1).Draw(rt, "ring")
	free := func(n int) bool { return m.rings[ring].Free() >= n }
	switch rapid.SampledFrom([]string{"post", "post", "indirect", "bad", "feed", "feed", "credit", "switch", "swap", "stop", "break"}).Draw(rt, "action") {
	case "post":
		sizes := rapid.SliceOfN(rapid.SampledFrom([]int{0, 5, 12, 64, 500, 2000, 4096}), 1, 4).Draw(rt, "sizes")
		for range rapid.IntRange(1, 40).Draw(rt, "chains") {
			if free(len(sizes) + 1) {
				m.post(ring, cut(m.place(make([]byte, sum(sizes)+1)), sum(sizes)+1, ring == 0, sizes...))
			}
		}
	case "indirect":
		if free(1) && m.o.features.Has(virtio.FRingIndirectDesc) {
			n := rapid.IntRange(14, 20000).Draw(rt, "bytes")
			m.postIndirect(ring, pieces(m.place(make([]byte, n)), n, rapid.IntRange(60, 3000).Draw(rt, "piece"), ring == 0))
		}
	case "bad":
		b := rapid.SampledFrom([]driver.Buf{{Addr: 1 << 40, Len: 99}, {Addr: m.bufs, Len: 0}, {Addr: m.bufs, Len: 1 << 31}, {Addr: m.bufs, Len: 99, Write: true}}).Draw(rt, "buf")
		if free(1) {
			m.post(ring, []driver.Buf{b})
		}
	case "feed":
		for range rapid.IntRange(1, 10).Draw(rt, "frames") {
			p.queue(plain(rapid.SampledFrom([]int{14, 60, 1514, 9000, 20000}).Draw(rt, "bytes"), seed))
		}
	case "credit":
		p.allow(rapid.IntRange(0, 50).Draw(rt, "n"))
	case "switch":
		m.dev.EnableRing(ring, rapid.Bool().Draw(rt, "on"))
	case "swap":
		m.swap(false)
		m.swap(true)
	case "stop":
		m.stopMarked(rt, ring)
	case "break":
		if m.breakRing(ring) {
			m.run()
			m.stopMarked(rt, ring)
			m.stop(ring)
			m.reset(ring)
			m.start(ring)
		}
	}
}

// stopMarked stops a ring: what that publishes is marked, too.
func (m *migration) stopMarked(rt *rapid.T, i int) {
	m.fresh()
	m.loop.Do(func() {
		for _, p := range m.differ() {
			m.copyPage(p)
		}
	})
	m.stop(i)
	bits := m.marks()
	for _, p := range m.differ() {
		if !marked(bits, p) {
			rt.Fatalf("page %d changed when ring %d stopped, without a mark", p, i)
		}
	}
	m.start(i)
}

// TestDirtyPagesExact: a frame marks its buffer's pages and the used ring's, nothing else,
// and nothing at all without LOG_ALL; without the ring's flag the used ring is not marked.
func TestDirtyPagesExact(t *testing.T) {
	for _, features := range formats(baseFeatures) {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: features})
		m := r.migrate()
		want := func(pages ...uint64) {
			t.Helper()
			bits, all := m.fresh(), make([]byte, migrationPages/8)
			for _, gpa := range pages {
				all[gpa/guestmem.LogPage/8] |= 1 << (gpa / guestmem.LogPage % 8)
			}
			if !bytes.Equal(bits, all) {
				t.Fatalf("%v: marks %x\nwant %x", features, trim(bits), trim(all))
			}
		}
		l := r.layout()
		written := l.Used // the index and the first entries, in one page
		if r.packed() {
			written = l.Desc
		}
		buffer := r.bufs + 100*guestmem.LogPage
		r.loop.Do(func() { r.pair().disarm() }) // and no turn of the worker's own follows that would arm it
		deliver := func() {
			t.Helper()
			r.post(0, cut(buffer+4000, 3*4096, true))
			p.queue(plain(5000, 1)) // with the header up to byte 4000+5012 of the buffer
			r.run()
			r.used(0)
		}
		m.fresh()
		deliver()
		want(r.at[0]+written, buffer, buffer+4096, buffer+2*4096)
		for i := range 2 {
			r.dev.SetRingLog(i, vhostuser.RingLog{})
		}
		m.fresh()
		deliver()
		want(buffer, buffer+4096, buffer+2*4096)
		m.logRings()
		r.send(plain(60, 1))
		m.fresh()
		r.run()
		p.take()
		want(r.at[1] + written)
		m.fresh()
		r.dev.SetLog(nil, -1)
		deliver()
		want()
		m.end()
	}
}

func trim(b []byte) []byte { return b[:min(len(b), 96)] }

// TestDirtyLogFD: the eventfd is written after marks, and not without.
func TestDirtyLogFD(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	fd := must(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK))
	defer unix.Close(fd)
	signaled := func() bool {
		var b [8]byte
		n, _ := unix.Read(fd, b[:])
		return n == 8
	}
	r.dev.SetLog(nil, fd)
	r.offer(2000)
	p.feed(plain(60, 1))
	r.run()
	if signaled() {
		t.Error("written without a log")
	}
	m := r.migrate()
	r.dev.SetLog(m.log, fd)
	r.offer(2000)
	p.feed(plain(60, 1))
	r.run()
	if !signaled() {
		t.Error("not written after marks")
	}
	m.end()
}

// TestTruncatedDirtyLog is C73: the guest whose log vanishes loses its rings, another one
// of the same worker nothing.
func TestTruncatedDirtyLog(t *testing.T) {
	p := newFakePort()
	victim := newRig(t, p, rigOptions{features: baseFeatures})
	other := newRig(t, must(echo.New(echo.Options{})), rigOptions{features: baseFeatures, beside: victim})
	defer victim.close()
	defer other.close()
	m := victim.migrate()
	if err := unix.Ftruncate(m.fd, 0); err != nil {
		t.Fatal(err)
	}
	victim.offer(2000)
	p.feed(plain(60, 1))
	select {
	case err := <-victim.fatal:
		if err != errDirtyLog {
			t.Errorf("the device gave up because of %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("nobody noticed")
	}
	chain := other.offer(2000)
	other.send(plain(60, 2))
	other.run()
	other.run()
	other.wantReceived([]rxBuffer{chain}, plain(60, 2))
	m.end()
}

// TestDirtyLogAllocatesNothing pins that a batch with logging allocates nothing.
func TestDirtyLogAllocatesNothing(t *testing.T) {
	if raceBuild {
		t.Skip("not applicable: a race build allocates twice a turn here; make race runs the test without it as well")
	}
	for _, features := range formats(baseFeatures) {
		p := newFakePort()
		p.quiet = true
		r := newRig(t, p, rigOptions{features: features})
		m := r.migrate()
		r.loop.Do(func() {
			pair := r.pair()
			for range 100 {
				r.lap(pair, 32, 60)
			}
			if n := testing.AllocsPerRun(50, func() { r.lap(pair, 32, 60) }); n != 0 {
				t.Errorf("%v: %v allocations a turn", features, n)
			}
		})
		m.end()
	}
}

// TestControlQueueDirtyPages: a command marks its answer and the used ring.
func TestControlQueueDirtyPages(t *testing.T) {
	g := newControlGuest(t, worker.Block, frontend.Options{})
	g.start()
	fd := must(unix.MemfdCreate("dirty-log-test", unix.MFD_CLOEXEC))
	defer unix.Close(fd)
	const bits = 32 << 20 / guestmem.LogPage
	g.check(unix.Ftruncate(fd, bits/8))
	g.check(g.SetLogBase(bits/8, 0, fd))
	g.check(g.SetFeatures(g.Features | virtio.FVhostLogAll))
	addr := g.q.Addr()
	addr.Flags = 1
	g.check(g.SetVringAddr(addr))
	g.command(virtio.CtrlOK, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 2, 0)
	g.check(g.Sync())
	marks := make([]byte, bits/8)
	_ = must(unix.Pread(fd, marks, 0))
	buffers, n := g.q.Buffers()
	answer := buffers + n - 2048 + virtio.CtrlHdrLen + 2 // in the last buffer, which is used first
	for name, gpa := range map[string]uint64{"answer": answer, "used ring": addr.Log} {
		if !marked(marks, int(gpa/guestmem.LogPage)) {
			t.Errorf("the %s at %#x is not marked: %x", name, gpa, trim(marks))
		}
	}
}
