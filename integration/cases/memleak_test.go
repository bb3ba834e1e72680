package cases

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// TestMEM11_MappingsAndDescriptorsStayFlat: tables that replace each other, and front-ends that vanish, leave nothing behind.
func TestMEM11_MappingsAndDescriptorsStayFlat(t *testing.T) {
	d := serve(t, "echo")
	t.Run("tables", func(t *testing.T) {
		mem := memory(t)
		c := d.session(mem, plain)
		p := detached(t, mem, 0, plain)
		steps(t, rings(c, p), on(c, 0, 1))
		specs, fds := mem.Table()
		var base use
		for i := range rounds(110, 510) {
			if i == 10 {
				base = d.use()
			}
			fd, err := unix.MemfdCreate("vhost-user-frontend", unix.MFD_CLOEXEC)
			must(t, err)
			must(t, unix.Ftruncate(fd, 2<<20))
			extra := guestmem.RegionSpec{GPA: 1 << 40, Size: 2 << 20, UVA: 1 << 44}
			must(t, table(c, append(specs[:2:2], extra), append(fds[:2:2], fd)))
			must(t, unix.Close(fd))
		}
		d.flat(base)
		flows(t, p)
		must(t, c.Close())
		d.disconnected()
	})
	t.Run("front-ends", func(t *testing.T) {
		var base use
		for i := range rounds(40, 210) {
			if i == 10 {
				base = d.use()
			}
			mem, err := frontend.NewMemory(8 << 20)
			must(t, err)
			c, err := frontend.Connect(d.path, mem, frontend.Options{Features: plain})
			must(t, err)
			p, err := c.StartPair(0)
			must(t, err)
			must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, byte(i)), frontend.Direct))
			must(t, c.Close())
			must(t, mem.Close())
			d.disconnected()
		}
		d.flat(base)
		if n := d.use().memfds; n != 0 {
			t.Errorf("%d mappings of guest memory without a guest", n)
		}
	})
	d.serves()
}

// TestMEM11_ResidentMemory: front-ends that come and go leave no memory behind either. The race detector does, so this program is
// built without it.
func TestMEM11_ResidentMemory(t *testing.T) {
	d := prepare(t, "echo")
	var err error
	d.program, err = rig.Build(t.TempDir(), false)
	must(t, err)
	d.start()
	var base use
	const warm = 4 // the heap grows to its working size
	for round := range warm + rounds(2, 20) {
		for i := range 1500 {
			must(t, d.dial().Close())
			if i%100 == 0 {
				d.disconnected()
			}
		}
		for range 10 {
			d.serves()
		}
		now := d.use()
		t.Logf("%d MiB after %d front-ends", now.rss>>10, 1510*(round+1))
		if round < warm {
			base.rss = max(base.rss, now.rss)
		} else if now.rss > base.rss+base.rss/20+8<<10 {
			t.Errorf("%d KiB are resident after %d front-ends, at most %d KiB before", now.rss, 1510*(round+1), base.rss)
		}
	}
}

// TestMEM11_FramesUnderWayGoBack: the pages of frames that wait when a front-end leaves, or stops its rings, are free again. The
// arena is small, so that a few frames left behind each time would use it up.
func TestMEM11_FramesUnderWayGoBack(t *testing.T) {
	d := serve(t, "echo", "--arena-size", "16MiB")
	for round := range rounds(100, 500) {
		mem, err := frontend.NewMemory(16 << 20)
		must(t, err)
		c := d.connectLater(mem, frontend.Options{Features: plain})
		p := pair(t, c, 0)
		for i := range 100 { // without receive buffers they stay in the network; the arena has room for no more than 120
			must(t, p.Stage(virtio.NetHdr{}, frameOf(1514, byte(i)), []frontend.Layout{frontend.Direct, frontend.Indirect}[i%2]))
			must(t, p.TX.Flush())
		}
		if round%2 == 0 {
			must(t, p.DrainTx(patience))
			_, _, err := c.Stop(0)
			must(t, err)
		}
		must(t, c.Close())
		must(t, mem.Close())
	}
	d.disconnected()
	c := d.connect(memory(t), frontend.Options{Features: plain})
	fullRings(t, pair(t, c, 0))
	if n := d.ring(1).Drops["no_memory"]; n != 0 {
		t.Errorf("%d frames were dropped for lack of memory", n)
	}
}

// TestMEM11_RefusedTablesLeaveNothing: tables that are refused, region by region, close their descriptors and keep the old table.
func TestMEM11_RefusedTablesLeaveNothing(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t, 16<<20, 1<<20)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	specs, fds := mem.Table()
	var pipe [2]int
	must(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	base := d.use()
	for range rounds(10, 200) {
		for what, change := range map[string]func(s *guestmem.RegionSpec){
			"size 0":                        func(s *guestmem.RegionSpec) { s.Size = 0 },
			"guest addresses that wrap":     func(s *guestmem.RegionSpec) { s.GPA = ^uint64(0) - 4095 },
			"front-end addresses that wrap": func(s *guestmem.RegionSpec) { s.UVA = ^uint64(0) - 4095 },
			"file offset that wraps":        func(s *guestmem.RegionSpec) { s.MmapOffset = ^uint64(0) - 4095 },
			"longer than its file":          func(s *guestmem.RegionSpec) { s.Size += 4096 },
			"offset beyond its file":        func(s *guestmem.RegionSpec) { s.MmapOffset = 1 << 30 },
			"guest addresses twice":         func(s *guestmem.RegionSpec) { s.GPA = specs[0].GPA + 4096 },
			"front-end addresses twice":     func(s *guestmem.RegionSpec) { s.UVA = specs[0].UVA + 4096 },
		} {
			changed := []guestmem.RegionSpec{specs[0], specs[1]}
			change(&changed[1])
			mustRefuse(t, what, table(c, changed, fds))
		}
		mustRefuse(t, "a pipe as memory", table(c, specs, []int{fds[0], pipe[0]}))
		mustRefuse(t, "an eventfd as memory", table(c, specs, []int{fds[0], p.RX.ErrFD}))
	}
	d.flat(base)
	if n := d.logged("SET_MEM_TABLE"); n > 2 {
		t.Errorf("%d lines in the log about refused tables", n)
	}
	flows(t, p)
}

// TestMEM11_FileShrinks: a memory file that is cut under running rings ends that session and nothing else, not even a frame of the
// guest that shares the worker.
func TestMEM11_FileShrinks(t *testing.T) {
	d := serve(t, "echo")
	traffic := startLoad(t, d.neighbor())
	d.serves()
	base := d.use()
	for round := range rounds(4, 50) {
		mem, err := frontend.NewMemory(16 << 20)
		must(t, err)
		c := d.session(mem, plain)
		p := detached(t, mem, 0, plain)
		steps(t, rings(c, p), on(c, 0, 1))
		echoed(t, p, 1+round)
		must(t, unix.Ftruncate(mem.Regions[0].FD, 0))
		_ = p.TX.Kick() // the program looks at the ring
		must(t, c.AwaitClose(patience))
		must(t, c.Close())
		d.disconnected()
		must(t, unix.Ftruncate(mem.Regions[0].FD, 16<<20))
		must(t, mem.Close())
		d.serves()
	}
	traffic.end(t)
	d.flat(base)
}
