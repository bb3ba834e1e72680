package cases

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// iommuGuest connects a client behind an IOMMU whose answers come as answer says.
func (d *vhostd) iommuGuest(u *frontend.IOMMU, opts frontend.Options) (*frontend.Client, *frontend.Pair) {
	d.t.Helper()
	opts.IOMMU = u
	c := d.connect(memory(d.t, 64<<20), opts)
	return c, pair(d.t, c, 0)
}

// echoes sends frames of many sizes in every layout and expects each of them back.
func echoes(t *testing.T, p *frontend.Pair, frames int, sizes ...int) {
	t.Helper()
	for i := range frames {
		frame := frameOf(sizes[i%len(sizes)], byte(i))
		_, err := p.PostRx(64)
		must(t, err)
		must(t, p.SendTx(virtio.NetHdr{}, frame, frontend.Layout(i%3)))
		_, got, err := p.RecvFrame(patience)
		must(t, err)
		if !bytes.Equal(got, frame) {
			t.Fatalf("frame %d of %d bytes came back as %d bytes that differ", i, len(frame), len(got))
		}
	}
	must(t, p.DrainTx(patience))
}

var iommuFormats = map[string]virtio.Features{
	"split": plain, "packed": plain | virtio.FRingPacked, "split, event index": plain | virtio.FRingEventIdx,
	"packed, in order": plain | virtio.FRingPacked | virtio.FInOrder, "single buffers": plain &^ virtio.FNetMrgRxBuf,
}

// TestIOMMU sends frames through rings and buffers that nobody has translated before, with prompt and with late answers.
func TestIOMMU(t *testing.T) {
	for name, features := range iommuFormats {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/late=%v", name, late), func(t *testing.T) {
				d := serve(t, "echo,swap=off")
				u := &frontend.IOMMU{}
				if late {
					u.Answer = func(vhostuser.IOTLBMsg) (time.Duration, bool) { return rand.N(2 * time.Millisecond), true }
				}
				sizes := []int{60, 1514, 4000, 9000}
				opts := frontend.Options{Features: features, TxBuf: 10 << 10}
				if !features.Has(virtio.FNetMrgRxBuf) {
					opts.RxBuf = 10 << 10
				}
				c, p := d.iommuGuest(u, opts)
				echoes(t, p, 40, sizes...)
				misses := len(u.Misses())
				if misses == 0 {
					t.Error("nothing was missed")
				}
				must(t, u.Err())
				if n := d.drops(0) + d.drops(1); n != 0 {
					t.Errorf("%d frames or chains were dropped", n)
				}
				must(t, c.Close())
			})
		}
	}
}

// TestC77_InvalidationsUnderTraffic takes translations back while frames go round: nothing is lost, and nothing is used that
// was taken back.
func TestC77_InvalidationsUnderTraffic(t *testing.T) {
	for name, features := range iommuFormats {
		if !features.Has(virtio.FNetMrgRxBuf) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			d := serve(t, "echo,swap=off")
			u := &frontend.IOMMU{}
			c, p := d.iommuGuest(u, frontend.Options{Features: features, TxBuf: 10 << 10})
			var wg sync.WaitGroup
			quit := make(chan struct{})
			wg.Go(func() {
				for {
					select {
					case <-quit:
						return
					case <-time.After(rand.N(3 * time.Millisecond)):
					}
					at, size := uint64(frontend.IOVABase), uint64(64<<20)
					switch rand.IntN(3) {
					case 0:
						at, size = 0, ^uint64(0)
					case 1:
						at, size = at+rand.Uint64N(64<<20)&^4095, 16*4096
					}
					if err := u.Invalidate(at, size); err != nil {
						t.Errorf("invalidation: %v", err)
						return
					}
				}
			})
			echoes(t, p, rounds(150, 5000), 60, 1514, 9000)
			close(quit)
			wg.Wait()
			must(t, u.Err())
			if n := d.drops(0) + d.drops(1); n != 0 {
				t.Errorf("%d frames or chains were dropped", n)
			}
			must(t, c.Close())
		})
	}
}

// TestC76_UnansweredMiss: a ring that waits for ever leaves the other ring and other guests alone, costs no processor time, and
// can be stopped; a descriptor with an address that nobody translates costs its own ring only.
func TestC76_UnansweredMiss(t *testing.T) {
	for name, features := range map[string]virtio.Features{"split": plain, "packed": plain | virtio.FRingPacked} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, "source")
			var mu sync.Mutex
			deny := false
			u := &frontend.IOMMU{Answer: func(m vhostuser.IOTLBMsg) (time.Duration, bool) {
				mu.Lock()
				defer mu.Unlock()
				return 0, !deny || m.Perm == 2
			}}
			c, p := d.iommuGuest(u, frontend.Options{Features: features})
			_, err := p.PostRx(64)
			must(t, err)
			_, _, err = p.RecvFrame(patience)
			must(t, err)
			mu.Lock()
			deny = true
			mu.Unlock()
			must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct)) // waits
			for range 20 {
				_, err := p.PostRx(64)
				must(t, err)
				_, _, err = p.RecvFrame(patience)
				must(t, err)
			}
			if p.TX.Driver.HasUsed() {
				t.Error("a frame was sent from an address that nobody translated")
			}
			begin := time.Now()
			_, tx, err := c.Stop(0)
			must(t, err)
			soon(t, "the answer to GET_VRING_BASE", begin)
			if features == plain && tx != 0 {
				t.Errorf("the ring that waits stopped at %d", tx)
			}
			mu.Lock()
			deny = false
			mu.Unlock()
			// What was asked stays open: another channel is asked again.
			p, err = c.StartPair(0)
			must(t, err)
			must(t, u.Invalidate(0, ^uint64(0)))
			must(t, p.DrainTx(patience))
			must(t, c.Close())
			d.disconnected()
		})
	}
}

// TestC76_IdleWhileWaiting: waiting takes no processor time.
func TestC76_IdleWhileWaiting(t *testing.T) {
	d := serve(t, "null", "--wake", "block")
	u := &frontend.IOMMU{Answer: func(m vhostuser.IOTLBMsg) (time.Duration, bool) { return 0, m.IOVA < frontend.IOVABase+16<<20 }}
	c, p := d.iommuGuest(u, frontend.Options{Features: plain})
	must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
	must(t, p.DrainTx(patience))
	must(t, u.Invalidate(0, ^uint64(0)))
	u2 := len(u.Misses())
	must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
	eventually(t, "a miss", func() bool { return len(u.Misses()) > u2 })
	d.idle(0.1, 300*time.Millisecond)
	must(t, c.Close())
}

// TestC75_IOTLBMessages: nonsense is refused, and traffic goes on.
func TestC75_IOTLBMessages(t *testing.T) {
	d := serve(t, "echo,swap=off")
	u := &frontend.IOMMU{}
	c, p := d.iommuGuest(u, frontend.Options{Features: plain})
	uva := c.Mem.Regions[0].UVA
	for _, m := range []vhostuser.IOTLBMsg{
		{Type: vhostuser.IOTLBUpdate, Perm: 3, UVA: uva},
		{Type: vhostuser.IOTLBUpdate, Perm: 3, UVA: uva, IOVA: ^uint64(0), Size: 4096},
		{Type: vhostuser.IOTLBUpdate, Perm: 3, UVA: 5, Size: 4096},
		{Type: vhostuser.IOTLBUpdate, Perm: 0, UVA: uva, Size: 4096},
		{Type: vhostuser.IOTLBUpdate, Perm: 9, UVA: uva, Size: 4096},
		{Type: vhostuser.IOTLBMiss, Size: 4096}, {Type: 0}, {Type: 4}, {Type: 9},
	} {
		var refused *frontend.RefusedError
		if err := c.IOTLB(m); !errors.As(err, &refused) {
			t.Errorf("%+v: %v", m, err)
		}
		echoes(t, p, 3, 60)
	}
	must(t, c.Close())
}

// TestC78_C79_Channels replaces the channel again and again under traffic with invalidations, also by one that is closed at once.
func TestC78_C79_Channels(t *testing.T) {
	d := serve(t, "echo,swap=off")
	idle := d.use()
	u := &frontend.IOMMU{}
	c, p := d.iommuGuest(u, frontend.Options{Features: plain})
	echoes(t, p, 5, 60, 1514)
	base := d.use()
	for range rounds(20, 1000) {
		must(t, u.Invalidate(0, ^uint64(0)))
		must(t, u.Reattach())
		echoes(t, p, 3, 60, 1514)
	}
	d.flat(base)
	must(t, u.Err())
	must(t, c.Close())
	d.disconnected()
	d.flat(idle)
}
