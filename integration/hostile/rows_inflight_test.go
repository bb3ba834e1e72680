package hostile

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// inflight hands a file of the given contents over as an inflight region.
func (a *attack) inflight(c *frontend.Client, d vhostuser.InflightDesc, contents []byte) error {
	a.t.Helper()
	fd := a.memfd(int64(max(len(contents), 4096)))
	_, err := unix.Pwrite(fd, contents, 0)
	must(a.t, err)
	return c.SetInflightFD(frontend.Inflight{InflightDesc: d, FD: fd})
}

var inflightRows = []row{
	{"A3", "inflight_regions_over_and_over", func(a *attack) {
		c := a.client(frontend.Options{})
		var before held
		for i := range 250 {
			in, err := c.GetInflightFD(8, 256)
			must(a.t, err)
			must(a.t, c.SetInflightFD(in))
			must(a.t, in.Close())
			if i == 10 {
				before = a.held()
			}
		}
		a.flat(before)
		a.flows(a.pair(c, 0))
	}},
	{"A5", "inflight_queues_and_size_beyond_the_rings", func(a *attack) {
		c := a.client(frontend.Options{})
		for _, d := range []vhostuser.InflightDesc{
			{Size: 1 << 20, Queues: 0, QueueSize: 64}, {Size: 1 << 20, Queues: 19, QueueSize: 64}, {Size: 1 << 20, Queues: 65535, QueueSize: 65535},
			{Size: 1 << 20, Queues: 8, QueueSize: 0}, {Size: 64, Queues: 8, QueueSize: 64}, {Size: 1 << 30, Queues: 8, QueueSize: 32768},
			{Size: 1 << 20, Offset: 4096, Queues: 8, QueueSize: 64}, {Size: 1 << 20, Offset: 1, Queues: 8, QueueSize: 64},
		} {
			a.refused(fmt.Sprintf("%+v of a page", d), a.inflight(c, d, nil))
		}
		a.flows(a.pair(c, 0))
	}},
	{"A6", "inflight_messages_with_wrong_descriptors", func(a *attack) {
		c := a.client(frontend.Options{})
		in, err := c.GetInflightFD(8, 64)
		must(a.t, err)
		defer in.Close()
		payload := in.Append(nil)
		a.refused("none", c.DoAck(vhostuser.ReqSetInflightFD, payload))
		a.refused("two", c.DoAck(vhostuser.ReqSetInflightFD, payload, in.FD, in.FD))
		a.refused("an eventfd", c.DoAck(vhostuser.ReqSetInflightFD, payload, a.eventfd(0)))
		before := a.files()
		for range 20 {
			if !a.answeredOnce(c.Conn, vhostuser.ReqGetInflightFD, payload, []int{in.FD, in.FD, in.FD}) {
				a.t.Error("descriptors with GET_INFLIGHT_FD end the connection")
			}
		}
		if n := a.files(); n > before {
			a.t.Errorf("%d descriptors are open, %d were", n, before)
		}
		a.flows(a.pair(c, 0))
	}},
	{"A7", "ring_larger_than_its_inflight_table", func(a *attack) {
		c := a.client(frontend.Options{RingSize: 128})
		in, err := c.GetInflightFD(8, 64)
		must(a.t, err)
		defer in.Close()
		must(a.t, c.SetInflightFD(in))
		a.refused("a ring of 128 with a table for 64", c.SetVringNum(0, 128))
		must(a.t, c.SetVringNum(0, 64))
		a.refused("a ring of 32768 with a table for 64", c.SetVringNum(0, 32768))
		in2, err := c.GetInflightFD(8, 128)
		must(a.t, err)
		defer in2.Close()
		must(a.t, c.SetInflightFD(in2))
		p := a.pair(c, 0)
		for range 140 { // around the table, twice
			a.flows(p)
		}
	}},
	{"A11", "inflight_region_with_hostile_contents", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			for name, value := range map[string]uint16{"all ones": 0xffff, "beyond the ring": 64, "small": 1} {
				contents := make([]byte, 1<<16)
				for i := 0; i < len(contents); i += 2 {
					binary.LittleEndian.PutUint16(contents[i:], value)
				}
				for i := range 8 { // parts that say of themselves that they are whole
					stride := map[bool]int{false: (16 + 16*64 + 63) &^ 63, true: (32 + 32*64 + 63) &^ 63}[f.Has(virtio.FRingPacked)]
					binary.LittleEndian.PutUint16(contents[i*stride+8:], 1)
					binary.LittleEndian.PutUint16(contents[i*stride+10:], 64)
				}
				c := a.client(frontend.Options{Features: f})
				d := vhostuser.InflightDesc{Size: 1 << 16, Queues: 8, QueueSize: 64}
				if err := a.inflight(c, d, contents); err != nil {
					a.t.Fatalf("%s: %v", name, err)
				}
				p := a.pair(c, 0)
				for range 70 {
					a.flows(p)
				}
				must(a.t, c.Close())
			}
		})
	}},
	{"A13", "inflight_sizes_above_32_bits", func(a *attack) {
		c := a.client(frontend.Options{})
		for _, d := range []vhostuser.InflightDesc{
			{Size: 1<<32 + 64, Queues: 8, QueueSize: 64}, {Size: 1 << 32, Offset: 1 << 32, Queues: 8, QueueSize: 64},
			{Size: 1 << 63, Offset: 1 << 63, Queues: 8, QueueSize: 64}, {Size: ^uint64(0), Offset: 64, Queues: 8, QueueSize: 64},
		} {
			a.refused(fmt.Sprintf("%+v of a page", d), a.inflight(c, d, nil))
		}
		a.flows(a.pair(c, 0))
	}},
	{"B26", "ring_raised_after_its_side_tables_were_made", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c := a.client(frontend.Options{Features: f | virtio.FInOrder, RingSize: 128})
			for i := range 2 { // a life with few descriptors
				must(a.t, c.SetVringNum(i, 8))
			}
			p := a.pair(c, 0)
			_, _, err := c.Stop(0)
			must(a.t, err)
			for _, n := range []uint32{8, 128} {
				for i := range 2 {
					must(a.t, c.SetVringNum(i, n))
				}
				p.Reset()
				p = a.pair(c, 0)
				a.refused("another size while it runs", c.SetVringNum(1, 256))
				for range 20 {
					a.burst(p, 100)
				}
				_, _, err = c.Stop(0)
				must(a.t, err)
			}
		})
	}},
}

// burst sends n frames at once and wants all of them back.
func (a *attack) burst(p *frontend.Pair, n int) {
	a.t.Helper()
	_, err := p.PostRx(n)
	must(a.t, err)
	for i := range n {
		must(a.t, p.Stage(virtio.NetHdr{}, frameOf(60, byte(i)), frontend.Direct))
	}
	must(a.t, p.TX.Flush())
	for i := range n {
		_, got, err := p.RecvFrame(patience)
		must(a.t, err)
		if string(got) != string(swapped(frameOf(60, byte(i)))) {
			a.t.Fatalf("frame %d of %d is % x", i, n, got)
		}
	}
	must(a.t, p.DrainTx(patience))
}
