package hostile

import (
	"fmt"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// controlled are the features of a driver that finds a control queue.
const controlled = features | virtio.FNetMAC | virtio.FNetStatus | virtio.FNetCtrlVQ | virtio.FNetCtrlRX | virtio.FNetCtrlRXExtra |
	virtio.FNetCtrlVLAN | virtio.FNetCtrlMACAddr

var ringRows = []row{
	{"A2", "ring_index_out_of_range_or_truncated", func(a *attack) {
		c, p := a.running(frontend.Options{})
		before := a.held()
		for _, v := range []uint64{18, 255, 0x201, 1 << 16, 1<<16 | 1, 1<<32 | 1, 1 << 63} {
			for _, req := range []vhostuser.Request{vhostuser.ReqSetVringKick, vhostuser.ReqSetVringCall, vhostuser.ReqSetVringErr} {
				a.refused(fmt.Sprintf("%v with %#x", req, v), c.DoAck(req, word(v), p.TX.KickFD))
			}
		}
		for _, i := range []uint32{256, 257, 1 << 16, 1<<16 | 1, 1 << 31, 0xffffffff} {
			for _, req := range []vhostuser.Request{vhostuser.ReqSetVringNum, vhostuser.ReqSetVringBase, vhostuser.ReqSetVringEnable} {
				a.refused(fmt.Sprintf("%v of ring %#x", req, i), c.DoAck(req, state(i, 1)))
			}
		}
		a.flat(before)
		a.flows(p)
	}},
	{"A9", "last_ring_of_all_pairs_and_the_control_queue", func(a *attack) {
		c := a.client(frontend.Options{Order: frontend.Crosvm, Features: controlled})
		if c.QueueNum != 9 {
			a.t.Fatalf("GET_QUEUE_NUM is %d for 4 pairs and a control queue", c.QueueNum)
		}
		p := a.pair(c, 3)
		q, err := c.StartControl(4)
		must(a.t, err)
		a.command(q, virtio.CtrlOK, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 4, 0)
		a.flows(p)
		behind := p.TX.Addr()
		behind.Index = 17 // the last that can be named
		must(a.t, c.SetVringAddr(behind))
		a.refused("the ring behind it", c.SetVringNum(18, 64))
	}},
	{"A19", "features_and_kick_again_while_running", func(a *attack) {
		c, p := a.running(frontend.Options{})
		must(a.t, c.SetVringEnable(2, false))
		for range 20 {
			must(a.t, c.SetFeatures(c.Features))
			must(a.t, c.SetVringKick(1, p.TX.KickFD))
			a.flows(p)
		}
		for _, r := range a.status("evil").Rings {
			if want := r.Index < 2; r.Enabled != want {
				a.t.Errorf("ring %d: enabled is %v", r.Index, r.Enabled)
			}
		}
	}},
	{"A20", "position_after_a_reboot", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for range 40 {
			a.flows(p)
		}
		rx, tx, err := c.Stop(0)
		if err != nil || rx != 40 || tx != 40 {
			a.t.Errorf("stopped at %d and %d, %v; want 40", rx, tx, err)
		}
		p.Reset() // base and memory are 0
		a.flows(a.pair(c, 0))
		if n := p.TX.Ring.PeekUsedIdx(); n != 1 {
			a.t.Errorf("used index %d after one frame", n)
		}
		_, _, err = c.Stop(0)
		must(a.t, err)
		must(a.t, c.SetVringBase(1, 0)) // although memory says 1
		must(a.t, c.SetVringKick(1, p.TX.KickFD))
		must(a.t, c.SetVringKick(0, p.RX.KickFD))
		a.flows(p)
	}},
	{"B32", "replies_and_what_a_request_leaves", func(a *attack) {
		c := a.client(frontend.Options{})
		payload := vhostuser.InflightDesc{Queues: 8, QueueSize: 64}.Append(nil)
		copy(payload[20:], "DATA")
		var before held
		for i := range 60 {
			must(a.t, c.Send(vhostuser.ReqGetInflightFD, vhostuser.FlagVersion, payload))
			r, err := c.Recv(patience)
			must(a.t, err)
			in := frontend.Inflight{InflightDesc: vhostuser.DecodeInflightDesc(r.Payload), FD: r.FDs[0]}
			if pad := r.Payload[20:]; string(pad) != "\x00\x00\x00\x00" || in.Queues != 8 || in.QueueSize != 64 {
				a.t.Fatalf("reply % x", r.Payload)
			}
			if i%50 == 0 {
				a.isZero(in.FD, in.Size)
			}
			must(a.t, in.Close())
			if _, err := c.GetConfig(0, 24); err != nil {
				a.t.Fatal(err)
			}
			if i == 10 {
				before = a.held()
			}
		}
		a.flat(before)
	}},
	{"C33", "sizes", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for _, n := range []uint32{0, 3, 32769, 65536, 1 << 31, 0xffffffff} {
			a.refused(fmt.Sprint("size ", n), c.SetVringNum(2, n))
		}
		for _, n := range []uint32{1, 32768} {
			must(a.t, c.SetVringNum(2, n))
		}
		a.refused("another size while it runs", c.SetVringNum(1, 32))
		a.flows(p)
		must(a.t, c.Close())
		_, p = a.running(frontend.Options{RingSize: 1})
		for range 5 {
			a.flows(p)
		}
	}},
	{"C34", "sizes_that_are_no_power_of_two", func(a *attack) {
		c := a.client(frontend.Options{})
		for _, n := range []uint32{3, 100, 32767} {
			a.refused(fmt.Sprint("split ring of ", n), c.SetVringNum(0, n))
		}
		must(a.t, c.Close())
		for _, n := range []int{3, 100} {
			c, p := a.running(frontend.Options{RingSize: n, Features: features | virtio.FRingPacked})
			for range 2*n + 1 {
				a.flows(p)
			}
			must(a.t, c.Close())
		}
	}},
	{"C35", "misaligned_areas", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			offsets := [][3]uint64{{8, 0, 0}, {0, 1, 0}, {0, 0, 2}, {1, 1, 1}}
			if f.Has(virtio.FRingPacked) {
				offsets = append(offsets, [3]uint64{0, 2, 0})
			}
			_, _, err := c.Stop(0)
			must(a.t, err)
			for _, off := range offsets {
				addr := p.TX.Addr()
				addr.Desc, addr.Avail, addr.Used = addr.Desc+off[0], addr.Avail+off[1], addr.Used+off[2]
				a.refused(fmt.Sprint("a ring misaligned by ", off), startAt(c, addr, p.TX.KickFD))
			}
			a.flows(a.pair(c, 0))
		})
	}},
	{"C36", "ring_that_leaves_its_region", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			_, _, err := c.Stop(0)
			must(a.t, err)
			end := c.Mem.Regions[0].UVA + regionEnd
			good := p.TX.Addr()
			for name, place := range map[string]func(v *vhostuser.VringAddr){
				"descriptors": func(v *vhostuser.VringAddr) { v.Desc = end - 16*64 + 16 },
				"available":   func(v *vhostuser.VringAddr) { v.Avail = end },
				"used":        func(v *vhostuser.VringAddr) { v.Used = ^uint64(3) },
				"all":         func(v *vhostuser.VringAddr) { v.Desc, v.Avail, v.Used = 0, 0, 0 },
			} {
				addr := good
				place(&addr)
				a.refused(name, startAt(c, addr, p.TX.KickFD))
			}
			if !f.Has(virtio.FRingPacked) { // one byte too few
				addr := good
				addr.Used = end - (6 + 8*64) + 4
				a.refused("used ring", startAt(c, addr, p.TX.KickFD))
			}
			a.flows(a.pair(c, 0))
		})
	}},
	{"C37", "areas_that_overlap", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			_, _, err := c.Stop(0)
			must(a.t, err)
			good := p.TX.Addr()
			for _, addr := range []vhostuser.VringAddr{
				{Index: 1, Desc: good.Desc, Avail: good.Desc, Used: good.Desc},
				{Index: 1, Desc: good.Desc, Avail: good.Desc + 16, Used: good.Desc + 32},
				{Index: 1, Desc: good.Desc, Avail: good.Used, Used: good.Used},
			} {
				rubbish := c.Mem.Bytes(p.TX.GuestAddr().Desc, 16*64)
				for i := range rubbish {
					rubbish[i] = byte(3 * i)
				}
				if err := startAt(c, addr, p.TX.KickFD); err != nil {
					a.refused("areas that overlap", err)
				}
				must(a.t, p.TX.Kick())
				_, _, err := c.Stop(0)
				must(a.t, err)
			}
			p.Reset()
			a.flows(a.pair(c, 0))
		})
	}},
	{"C38", "index_above_the_largest", func(a *attack) {
		c, p := a.running(frontend.Options{})
		must(a.t, c.SetVringNum(17, 64))
		for _, i := range []int{18, 19, 254, 255} {
			a.refused(fmt.Sprint("enable ", i), c.SetVringEnable(i, true))
			a.refused(fmt.Sprint("base ", i), c.SetVringBase(i, 0))
		}
		a.flows(p)
		must(a.t, c.Close())
		a.closesAfter(message(vhostuser.ReqGetVringBase, state(18, 0)), "the position of ring 18")
	}},
	{"C39", "unknown_address_flags", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for bit := 1; bit < 32; bit++ {
			addr := p.TX.Addr()
			addr.Flags = 1 << bit
			a.refused(fmt.Sprint("flag ", bit), c.SetVringAddr(addr))
		}
		a.flows(p)
	}},
	{"C40", "positions_out_of_range", func(a *attack) {
		c := a.client(frontend.Options{})
		must(a.t, c.SetVringNum(1, 64))
		for _, base := range []uint32{1 << 16, 1 << 31, 0xffffffff} {
			a.refused(fmt.Sprintf("split, %#x", base), c.SetVringBase(1, base))
		}
		must(a.t, c.Close())
		c = a.client(frontend.Options{Features: features | virtio.FRingPacked})
		must(a.t, c.SetVringNum(1, 64))
		for _, base := range []uint32{64, 0x8040, 0x7fff, 0x8040_8000, 0x7fff_8000} {
			a.refused(fmt.Sprintf("packed, %#x", base), c.SetVringBase(1, base))
		}
		a.flows(a.pair(c, 0))
	}},
	{"C41", "position_of_any_ring_at_any_time", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for i := 2; i < 18; i++ {
			if base, err := c.GetVringBase(i); err != nil || base != 0 {
				a.t.Errorf("ring %d, which never ran: %d, %v", i, base, err)
			}
		}
		a.flows(p)
		for range 3 {
			b, err := c.Call(vhostuser.ReqGetVringBase, state(1, 0xdeadbeef))
			must(a.t, err)
			if v := vhostuser.DecodeVringState(b); v.Num != 1 {
				a.t.Errorf("position %d, want 1", v.Num)
			}
		}
	}},
	{"C46", "enable_with_2", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for _, n := range []uint32{2, 0xffffffff} {
			a.refused(fmt.Sprint("enable with ", n), c.DoAck(vhostuser.ReqSetVringEnable, state(1, n)))
		}
		a.flows(p)
	}},
	{"C47", "enable_and_call_before_features", func(a *attack) {
		c := a.conn()
		for i := range 8 {
			must(a.t, c.SetVringEnable(i, true))
			must(a.t, c.SetVringCall(i, a.eventfd(0)))
		}
		must(a.t, c.Close())
		_, p := a.running(frontend.Options{Order: frontend.QEMU}) // enables before anything else
		a.flows(p)
	}},
	{"C48", "features_not_offered_or_changed_while_running", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for _, f := range []virtio.Features{virtio.FNetMrgRxBuf, virtio.FRingEventIdx, virtio.FRingPacked, virtio.FInOrder, virtio.FVersion1} {
			a.refused("changed while running", c.SetFeatures(c.Features^f))
		}
		must(a.t, c.SetFeatures(c.Features|virtio.FVhostLogAll))
		must(a.t, c.SetFeatures(c.Features))
		a.flows(p)
		_, _, err := c.Stop(0)
		must(a.t, err)
		for _, f := range []virtio.Features{1 << 41, virtio.FNetRSS, virtio.FNetHashReport, virtio.FRingReset, virtio.FNotificationData, virtio.FNetGuestAnnounce} {
			a.refused(fmt.Sprint(f, ", which is not offered"), c.SetFeatures(c.Features|f))
		}
		a.flows(a.pair(c, 0))
	}},
	{"C49", "status_0_keeps_positions", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for range 7 {
			a.flows(p)
		}
		must(a.t, c.SetStatus(0))
		a.refused("a status above 255", c.DoAck(vhostuser.ReqSetStatus, word(0x100)))
		if rx, tx, err := c.Stop(0); err != nil || rx != 7 || tx != 7 {
			a.t.Errorf("positions %d and %d, %v; want 7", rx, tx, err)
		}
		a.flows(a.pair(c, 0))
	}},
	{"C50", "reset_while_busy_twice_and_first", func(a *attack) {
		bare := a.conn()
		must(a.t, bare.Do(vhostuser.ReqResetDevice, nil))
		must(a.t, bare.Do(vhostuser.ReqResetDevice, nil))
		must(a.t, bare.Close())
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			for range 5 {
				for range 32 {
					must(a.t, p.Stage(virtio.NetHdr{}, frameOf(1000, 1), frontend.Direct))
				}
				must(a.t, p.TX.Flush())
				must(a.t, c.Do(vhostuser.ReqResetDevice, nil))
				must(a.t, c.Do(vhostuser.ReqResetDevice, nil))
				for _, r := range a.status("evil").Rings {
					if r.Started || r.Enabled {
						a.t.Fatalf("after a reset: %+v", r)
					}
				}
				p.Reset()
				must(a.t, c.SetFeatures(c.Features))
				a.pair(c, 0)
				must(a.t, c.SetVringEnable(0, true)) // the client believes that it has done so
				must(a.t, c.SetVringEnable(1, true))
				a.flows(p)
			}
		})
	}},
	{"C51", "memory_before_features", func(a *attack) {
		c := a.client(frontend.Options{Order: frontend.Libkrun})
		a.flows(a.pair(c, 0))
	}},
	{"C52", "reset_by_disabling_alone", func(a *attack) {
		c := a.client(frontend.Options{Order: frontend.Libkrun})
		for range 4 {
			p := a.pair(c, 0)
			for range 9 {
				a.flows(p)
			}
			must(a.t, c.SetVringEnable(0, false))
			must(a.t, c.SetVringEnable(1, false))
			p.Reset()
		}
	}},
}
