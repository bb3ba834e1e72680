package hostile

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// table8 offers a memory table of up to eight regions.
func table8(c *frontend.Client, specs []guestmem.RegionSpec, fds []int) error {
	return c.DoAck(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, specs), fds...)
}

// refusesTable demands that a table with a changed second region, or another file for it, is refused and the old one stays in use.
func (a *attack) refusesTable(what string, file func(fd int) int, change func(s *guestmem.RegionSpec)) {
	a.t.Helper()
	c, p := a.running(frontend.Options{})
	defer c.Close()
	before := a.held()
	specs, fds := c.Mem.Table()
	change(&specs[1])
	if file != nil {
		fds[1] = file(fds[1])
	}
	for range 5 {
		a.refused(what, table8(c, specs, fds))
	}
	a.refused(what+", added", func() error {
		must(a.t, c.RemMemReg(c.Mem.Regions[1].RegionSpec))
		defer func() { must(a.t, c.AddMemReg(c.Mem.Regions[1].RegionSpec, c.Mem.Regions[1].FD)) }()
		return c.AddMemReg(specs[1], fds[1])
	}())
	a.flat(before)
	a.flows(p)
}

func same(*guestmem.RegionSpec) {}

var memoryRows = []row{
	{"A8", "other_memory_after_a_stop", func(a *attack) {
		c, p := a.running(frontend.Options{})
		a.flows(p)
		_, _, err := c.Stop(0)
		must(a.t, err)
		specs, fds := c.Mem.Table()
		must(a.t, table8(c, specs[1:], fds[1:]))
		for _, q := range []*frontend.Queue{p.RX, p.TX} {
			a.refused("kick of a ring whose memory is gone", c.SetVringKick(q.Index, q.KickFD))
		}
		must(a.t, table8(c, specs, fds))
		for _, q := range []*frontend.Queue{p.RX, p.TX} {
			must(a.t, c.SetVringKick(q.Index, q.KickFD)) // found again without another address
		}
		a.flows(p)
	}},
	{"A10", "counts_and_indexes_beyond_the_arrays", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for _, n := range []uint32{9, 10, 1 << 16, 0xffffffff} {
			a.refused(fmt.Sprint(n, " regions"), c.DoAck(vhostuser.ReqSetMemTable, append(word(uint64(n)), make([]byte, 8*32)...)))
		}
		for _, i := range []uint32{18, 255, 1 << 31} {
			for _, req := range []vhostuser.Request{vhostuser.ReqSetVringNum, vhostuser.ReqSetVringBase} {
				a.refused(fmt.Sprint(req, " of ring ", i), c.DoAck(req, state(i, 64)))
			}
			a.refused(fmt.Sprint("address of ring ", i), c.SetVringAddr(vhostuser.VringAddr{Index: i}))
		}
		for _, n := range []uint32{0, 32769, 1 << 31} {
			a.refused(fmt.Sprint("size ", n), c.SetVringNum(2, n))
		}
		a.flows(p)
		must(a.t, c.Close())
		a.closesAfter(message(vhostuser.ReqGetVringBase, state(18, 0)), "GET_VRING_BASE of ring 18")
	}},
	{"A26", "region_size_unchecked_before_mmap", func(a *attack) {
		for what, change := range map[string]func(s *guestmem.RegionSpec){
			"size 0":                    func(s *guestmem.RegionSpec) { s.Size = 0 },
			"size and offset that wrap": func(s *guestmem.RegionSpec) { s.Size, s.MmapOffset = ^uint64(0)-4095, 8192 },
			"larger than the file":      func(s *guestmem.RegionSpec) { s.Size += 4096 },
		} {
			a.refusesTable(what, nil, change)
		}
	}},
	{"C16", "size_0", func(a *attack) { a.refusesTable("size 0", nil, func(s *guestmem.RegionSpec) { s.Size = 0 }) }},
	{"C17", "guest_addresses_wrap", func(a *attack) {
		a.refusesTable("a wrap", nil, func(s *guestmem.RegionSpec) { s.GPA = ^uint64(0) - 4095 })
	}},
	{"C18", "frontend_addresses_wrap", func(a *attack) {
		a.refusesTable("a wrap", nil, func(s *guestmem.RegionSpec) { s.UVA = ^uint64(0) - 4095 })
	}},
	{"C19", "guest_addresses_overlap", func(a *attack) {
		a.refusesTable("an overlap", nil, func(s *guestmem.RegionSpec) { s.GPA = regionEnd - 1 })
	}},
	{"C20", "frontend_addresses_overlap", func(a *attack) {
		a.refusesTable("an overlap", nil, func(s *guestmem.RegionSpec) { s.UVA -= 1<<36 - regionEnd + 1 })
	}},
	{"C21", "file_too_short", func(a *attack) {
		a.refusesTable("a short file", func(int) int { return a.memfd(4096) }, same)
		a.refusesTable("an offset behind the end", nil, func(s *guestmem.RegionSpec) { s.MmapOffset = regionEnd })
	}},
	{"C22", "file_cut_under_running_rings", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			for _, region := range []int{0, 1} {
				c, p := a.running(frontend.Options{Features: f, Region: region})
				a.flows(p)
				must(a.t, unix.Ftruncate(c.Mem.Regions[region].FD, 0))
				_ = p.TX.Kick()
				a.closes("memory that vanished", c.Conn)
				must(a.t, unix.Ftruncate(c.Mem.Regions[region].FD, 64<<20)) // this process touches it, too
			}
		})
	}},
	{"C23", "offset_in_no_multiple_of_a_page", func(a *attack) {
		for _, offset := range []uint64{16, 0x550, 4096 + 64} {
			mem := &frontend.Memory{}
			_, err := mem.Add(guestmem.RegionSpec{Size: 64 << 20, UVA: 0x7c00_0000_0000, MmapOffset: offset})
			must(a.t, err)
			c := a.clientOn(mem, frontend.Options{})
			a.flows(a.pair(c, 0))
			must(a.t, c.Close())
			must(a.t, mem.Close())
		}
		mem := &frontend.Memory{}
		_, err := mem.Add(guestmem.RegionSpec{Size: 64 << 20, UVA: 0x7c00_0000_0000, MmapOffset: 4097})
		must(a.t, err)
		defer func() { must(a.t, mem.Close()) }()
		c := a.clientOn(mem, frontend.Options{})
		c.NeedReply = true
		must(a.t, c.SetVringNum(1, 64))
		odd := vhostuser.VringAddr{Index: 1, Desc: 0x7c00_0000_0000, Avail: 0x7c00_0000_1000, Used: 0x7c00_0000_2000}
		a.refused("a ring at an odd host address", startAt(c, odd, a.eventfd(0)))
	}},
	{"C24", "huge_pages", func(a *attack) {
		testmain.Hugepages(a.t, 2)
		fd, err := unix.MemfdCreate("rows", unix.MFD_CLOEXEC|unix.MFD_HUGETLB)
		must(a.t, err)
		defer unix.Close(fd)
		must(a.t, unix.Ftruncate(fd, 4<<20))
		c, p := a.running(frontend.Options{})
		specs, fds := c.Mem.Table()
		for _, s := range []guestmem.RegionSpec{{Size: 4 << 20}, {Size: 2<<20 - 4096, MmapOffset: 4096}, {Size: 4096, MmapOffset: 2 << 20}} {
			s.GPA, s.UVA = 1<<40, 1<<44
			must(a.t, table8(c, append(specs[:2:2], s), append(fds[:2:2], fd)))
			ds := []desc{{addr: s.GPA + s.Size - 72, len: 72}}
			a.offer(p.TX, ds...).returned(0) // read to the last byte
			a.receives(p, make([]byte, 60))
			a.fault(c, p, "address", nil, desc{addr: s.GPA + s.Size - 71, len: 72})
		}
		a.refused("larger than the file", table8(c, append(specs[:2:2], guestmem.RegionSpec{GPA: 1 << 40, UVA: 1 << 44, Size: 6 << 20}), append(fds[:2:2], fd)))
	}},
	{"C25", "files_that_are_no_memory", func(a *attack) {
		r, w := a.pipe()
		folder, err := os.Open(a.t.TempDir())
		must(a.t, err)
		defer folder.Close()
		readOnly, err := os.Open(os.Args[0])
		must(a.t, err)
		defer readOnly.Close()
		sealed := a.memfd(64 << 20)
		_, err = unix.FcntlInt(uintptr(sealed), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
		must(a.t, err)
		for what, fd := range map[string]int{
			"a pipe": int(r.Fd()), "the other end of it": int(w.Fd()), "a directory": int(folder.Fd()), "a file opened for reading": int(readOnly.Fd()),
			"memory sealed against writing": sealed, "an eventfd": a.eventfd(0),
		} {
			a.refusesTable(what, func(int) int { return fd }, func(s *guestmem.RegionSpec) { s.Size = 4096 })
		}
	}},
	{"C26", "number_of_regions", func(a *attack) {
		c, p := a.running(frontend.Options{})
		specs, fds := c.Mem.Table()
		nine, files := append([]guestmem.RegionSpec(nil), specs...), append([]int(nil), fds...)
		for k := range 7 {
			nine, files = append(nine, slot(k)), append(files, fds[1])
		}
		a.refused("nine regions", table8(c, nine, files))
		a.refused("0xffffffff regions", c.DoAck(vhostuser.ReqSetMemTable, append(word(0xffffffff), vhostuser.AppendMemTable(nil, specs)[8:]...), fds...))
		a.refused("two regions, one file", table8(c, specs, fds[:1]))
		if err := table8(c, nil, nil); err == nil {
			must(a.t, table8(c, specs, fds)) // no region is a table, too
		} else {
			a.refused("no region", err)
		}
		a.flows(p)
	}},
	{"C27", "region_added_twice", func(a *attack) {
		c, p := a.running(frontend.Options{})
		before := a.held()
		for range 50 {
			for _, r := range c.Mem.Regions {
				must(a.t, c.AddMemReg(r.RegionSpec, r.FD))
			}
		}
		a.refused("the same of another file", c.AddMemReg(c.Mem.Regions[0].RegionSpec, c.Mem.Regions[1].FD))
		a.flat(before)
		a.flows(p)
	}},
	{"C28", "region_removed_twice", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for range 10 {
			must(a.t, c.RemMemReg(c.Mem.Regions[1].RegionSpec))
		}
		a.refused("a region that never was", c.RemMemReg(slot(3)))
		a.flows(p)
	}},
	{"C29", "region_of_running_rings_removed", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			a.flows(p)
			own := c.Mem.Regions[0]
			must(a.t, c.RemMemReg(own.RegionSpec))
			_, err := p.PostRx(1)
			must(a.t, err)
			must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			must(a.t, p.TX.Kick())
			time.Sleep(20 * time.Millisecond)
			if p.TX.Driver.HasUsed() {
				a.t.Error("a ring without memory is served")
			}
			must(a.t, c.AddMemReg(own.RegionSpec, own.FD))
			_, _, err = p.RecvFrame(patience)
			must(a.t, err)
			must(a.t, p.DrainTx(patience))
			// Buffers in a region that leaves.
			must(a.t, c.RemMemReg(c.Mem.Regions[1].RegionSpec))
			a.fault(c, p, "address", nil, desc{addr: highAt, len: 72})
		})
	}},
	{"C30", "more_regions_than_slots", func(a *attack) {
		c, p := a.running(frontend.Options{})
		n, err := c.GetMaxMemSlots()
		must(a.t, err)
		fd := a.memfd(1 << 17)
		for k := range int(n) - 2 {
			must(a.t, c.AddMemReg(slot(k), fd))
		}
		before := a.held()
		for k := range 20 {
			a.refused("one more region than slots", c.AddMemReg(slot(int(n)+k), fd))
		}
		a.flat(before)
		a.flows(p)
	}},
	{"C31", "removal_with_a_file", func(a *attack) {
		c, p := a.running(frontend.Options{})
		before := a.held()
		for range 20 {
			r := c.Mem.Regions[1]
			must(a.t, c.RemMemReg(r.RegionSpec, r.FD))
			must(a.t, c.AddMemReg(r.RegionSpec, r.FD))
			a.refused("two files", c.RemMemReg(r.RegionSpec, r.FD, r.FD))
		}
		a.flat(before)
		a.flows(p)
	}},
	{"C32", "table_replaced_under_traffic", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			a.flows(p)
			before := a.held()
			stop, ended := make(chan struct{}), make(chan error, 1)
			go func() {
				var err error
				for i := byte(0); err == nil && !closed(stop); i++ {
					begin := time.Now()
					if err = roundTrip(p, frameOf(600, i)); err == nil && time.Since(begin) > 2*time.Second {
						err = fmt.Errorf("a frame took %v", time.Since(begin))
					}
				}
				ended <- err
			}()
			specs, fds := c.Mem.Table()
			extra := a.memfd(1 << 17)
			for i := range 100 {
				n := i % 2
				must(a.t, table8(c, append(specs[:2:2], []guestmem.RegionSpec{slot(i)}[:n]...), append(fds[:2:2], []int{extra}[:n]...)))
			}
			close(stop)
			must(a.t, <-ended)
			must(a.t, table8(c, specs, fds))
			a.flat(before)
		})
	}},
}

// startAt starts the ring at other addresses.
func startAt(c *frontend.Client, addr vhostuser.VringAddr, kick int) error {
	if err := c.SetVringAddr(addr); err != nil {
		return err
	}
	return c.SetVringKick(int(addr.Index), kick)
}
