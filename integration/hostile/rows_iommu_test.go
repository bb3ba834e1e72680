package hostile

import (
	"bytes"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// behindIOMMU is evil behind an IOMMU with a running queue pair.
func (a *attack) behindIOMMU(u *frontend.IOMMU, f virtio.Features) (*frontend.Client, *frontend.Pair) {
	a.t.Helper()
	return a.running(frontend.Options{Features: f, IOMMU: u})
}

var everything = vhostuser.IOTLBMsg{Size: 1<<64 - 1, Type: vhostuser.IOTLBInvalidate}

var translationRows = []row{
	{"A24", "log_address_is_an_iova", func(a *attack) {
		c, p := a.behindIOMMU(&frontend.IOMMU{}, features)
		a.flows(p) // a ring that starts later would have the next log get all pages
		l := a.log(wholeLog, 0)
		must(a.t, c.SetLogBase(l.size, 0, l.fd))
		must(a.t, c.SetFeatures(c.Features|virtio.FVhostLogAll))
		addr := p.TX.IOVAAddr()
		addr.Flags = 1
		must(a.t, c.SetVringAddr(addr))
		a.marksUsed(p, l)
		// An address that nobody translates stands for no page of its own.
		raw := a.log(wholeLog, 0)
		must(a.t, c.SetLogBase(raw.size, 0, raw.fd))
		addr.Log = bufAt
		must(a.t, c.SetVringAddr(addr))
		a.flows(p)
		if raw.marked(bufAt) {
			a.t.Errorf("the IOVA is taken for a guest address: %d pages are marked", raw.marks())
		}
	}},
	{"A27", "translation_of_running_rings_taken_back", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			var deny bool
			gate := make(chan struct{}, 1)
			gate <- struct{}{}
			u := &frontend.IOMMU{Answer: func(vhostuser.IOTLBMsg) (time.Duration, bool) {
				<-gate
				defer func() { gate <- struct{}{} }()
				return 0, !deny
			}}
			c, p := a.behindIOMMU(u, f)
			a.flows(p)
			set := func(v bool) { <-gate; deny = v; gate <- struct{}{} }
			set(true)
			must(a.t, c.IOTLB(everything))
			specs, fds := c.Mem.Table()
			must(a.t, table8(c, specs[1:], fds[1:])) // and the memory unmapped
			must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			must(a.t, p.TX.Kick())
			time.Sleep(20 * time.Millisecond)
			if p.TX.Driver.HasUsed() {
				a.t.Error("a ring without a translation is served")
			}
			must(a.t, table8(c, specs, fds))
			set(false)
			must(a.t, u.Reattach()) // what was not answered is asked again
			a.receives(p, frameOf(60, 1))
			a.flows(p)
			must(a.t, u.Err())
		})
	}},
	{"C75", "iotlb_messages_that_mean_nothing", func(a *attack) {
		c, p := a.behindIOMMU(&frontend.IOMMU{}, features)
		uva := c.Mem.Regions[0].UVA
		for _, m := range []vhostuser.IOTLBMsg{
			{Type: vhostuser.IOTLBUpdate, Perm: 3, UVA: uva},
			{Type: vhostuser.IOTLBUpdate, Perm: 3, UVA: uva, IOVA: ^uint64(0), Size: 4096},
			{Type: vhostuser.IOTLBUpdate, Perm: 3, UVA: 5, Size: 4096},
			{Type: vhostuser.IOTLBUpdate, Perm: 3, UVA: uva + regionEnd - 4096, Size: 8192},
			{Type: vhostuser.IOTLBUpdate, Perm: 0, UVA: uva, Size: 4096},
			{Type: vhostuser.IOTLBMiss, Size: 4096}, {Type: 0}, {Type: 4}, {Type: 9},
		} {
			a.refused(fmt.Sprintf("%+v", m), c.IOTLB(m))
		}
		for i := range uint64(64) { // contradict each other
			m := vhostuser.IOTLBMsg{Type: vhostuser.IOTLBUpdate, Perm: 3, IOVA: 1<<56 + i%7*4096, Size: 16 * 4096, UVA: uva + i*4096}
			must(a.t, c.IOTLB(m))
		}
		a.flows(p)
		must(a.t, c.Close())
		c = a.client(frontend.Options{})
		a.refused("an update without the feature", c.IOTLB(vhostuser.IOTLBMsg{Type: vhostuser.IOTLBUpdate, Perm: 3, UVA: uva, Size: 4096}))
	}},
	{"C76", "miss_that_nobody_answers", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			u := &frontend.IOMMU{Answer: func(m vhostuser.IOTLBMsg) (time.Duration, bool) { return 0, m.IOVA < frontend.IOVABase+bufAt }}
			c, p := a.behindIOMMU(u, f)
			a.flows(p)
			a.offer(p.TX, desc{addr: frontend.IOVABase + bufAt, len: 72})
			eventually(a.t, "the miss", func() bool {
				misses := u.Misses()
				return misses[len(misses)-1].IOVA>>12 == (frontend.IOVABase+bufAt)>>12
			})
			begin := time.Now()
			_, _, err := c.Stop(0)
			must(a.t, err)
			if took := time.Since(begin); took > 2*time.Second {
				a.t.Errorf("the ring that waits is stopped after %v", took)
			}
			p.Reset()
			a.flows(a.pair(c, 0))
		})
	}},
	{"C77", "translations_taken_back_in_use", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			u := &frontend.IOMMU{}
			c, p := a.behindIOMMU(u, f)
			stop, ended := make(chan struct{}), make(chan error, 1)
			go func() {
				var err error
				for i := 0; err == nil && !closed(stop); i++ {
					err = roundTrip(p, frameOf(60+i%1400, byte(i)))
				}
				ended <- err
			}()
			for i := range uint64(20) {
				must(a.t, c.IOTLB(everything))
				must(a.t, u.Invalidate(frontend.IOVABase+i*4096, 64*4096))
				time.Sleep(time.Millisecond)
			}
			close(stop)
			must(a.t, <-ended)
			must(a.t, u.Err())
		})
	}},
	{"C78", "channel_that_is_not_read_closed_or_talks", func(a *attack) {
		c, p := a.running(frontend.Options{Features: features | virtio.FAccessPlatform})
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_SEQPACKET} {
			for _, what := range []func(peer int){
				func(int) {}, // reads nothing
				func(peer int) { must(a.t, unix.Shutdown(peer, unix.SHUT_RDWR)) },
				func(peer int) { _, _ = unix.Write(peer, bytes.Repeat([]byte{0xff}, 1<<12)) },
				func(peer int) { _, _ = unix.Write(peer, append(header(vhostuser.ReqIOTLBMsg, 5, 8), word(0)...)) }, // a reply to nothing
			} {
				pair, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
				must(a.t, err)
				must(a.t, c.DoAck(vhostuser.ReqSetBackendReqFD, nil, pair[1]))
				unix.Close(pair[1])
				what(pair[0])
				for i := range uint64(40) { // each asks for the rings again
					must(a.t, c.IOTLB(vhostuser.IOTLBMsg{IOVA: i << 12, Size: 4096, Type: vhostuser.IOTLBInvalidate}))
				}
				must(a.t, c.Sync())
				unix.Close(pair[0])
			}
		}
		_, _, err := c.Stop(0)
		must(a.t, err)
		if p.TX.Driver.HasUsed() {
			a.t.Error("a ring that nobody translated is served")
		}
	}},
	{"C79", "channel_handed_over_twice", func(a *attack) {
		u := &frontend.IOMMU{}
		c, p := a.behindIOMMU(u, features)
		a.flows(p)
		before := a.held()
		for range 10 {
			must(a.t, c.IOTLB(everything))
			must(a.t, u.Reattach())
			a.flows(p)
		}
		a.flat(before)
		a.refused("an eventfd", c.DoAck(vhostuser.ReqSetBackendReqFD, nil, a.eventfd(0)))
		must(a.t, u.Err())
	}},
}
