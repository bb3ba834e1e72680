package hostile

import (
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// repeat calls f until the test ends or f fails.
func repeat(t *testing.T, f func() error) {
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-stop:
				return
			default:
				if f() != nil {
					return
				}
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-ended
	})
}

// TestFloods: messages of one front-end, as fast as they go, do not keep another guest's frames waiting.
func TestFloods(t *testing.T) {
	for name, flood := range map[string]func(c *frontend.Client, i int) error{
		"enable":  func(c *frontend.Client, i int) error { return c.SetVringEnable(i%8, i%3 == 0) },
		"memory":  func(c *frontend.Client, _ int) error { return c.SetMemory(c.Mem) },
		"call":    func(c *frontend.Client, i int) error { return c.SetVringCall(i%2, -1) },
		"stop":    func(c *frontend.Client, i int) error { _, err := c.GetVringBase(i % 8); return err },
		"restart": restartPair,
		"reset": func(c *frontend.Client, i int) error {
			if err := c.Do(vhostuser.ReqResetDevice, nil); err != nil {
				return err
			}
			if err := c.SetFeatures(c.Features); err != nil {
				return err
			}
			_, err := c.StartPair(i % 4)
			return err
		},
		"slots": func(c *frontend.Client, i int) error {
			spec := slot(i % 500)
			spec.MmapOffset = 0
			if i/500%2 == 1 {
				return c.RemMemReg(spec)
			}
			return c.AddMemReg(spec, c.Mem.Regions[0].FD)
		},
		// Each log gets all pages, because a ring has started since the one before.
		"log": func(c *frontend.Client, i int) error {
			if err := c.SetFeatures(c.Features | virtio.FVhostLogAll); err != nil {
				return err
			}
			if err := restartPair(c, i); err != nil {
				return err
			}
			return c.SetLogBase(1<<18, 0, c.Mem.Regions[1].FD)
		},
		"inflight": func(c *frontend.Client, i int) error {
			for ring := range 8 {
				if _, err := c.GetVringBase(ring); err != nil {
					return err
				}
			}
			in, err := c.GetInflightFD(8, 32768)
			if err != nil {
				return err
			}
			defer in.Close()
			if err := c.SetInflightFD(in); err != nil {
				return err
			}
			_, err = c.StartPair(i % 4)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, true)
			_, good := d.guest("good", frontend.Options{})
			c, _ := d.guest("evil", frontend.Options{})
			for i := range 4 {
				_, err := c.StartPair(i)
				must(t, err)
			}
			var i atomic.Int64
			repeat(t, func() error { return flood(c, int(i.Add(1))) })
			w := worst(t, good, 700*time.Millisecond)
			t.Logf("%v, %d rounds", w, i.Load())
			if w > 500*time.Millisecond {
				t.Errorf("the good guest waited for %v", w)
			}
		})
	}
}

func restartPair(c *frontend.Client, i int) error {
	if _, _, err := c.Stop(i % 4); err != nil {
		return err
	}
	_, err := c.StartPair(i % 4)
	return err
}

// TestTranslationFloods: neither does a front-end behind an IOMMU that changes all translations all the time.
func TestTranslationFloods(t *testing.T) {
	for name, flood := range map[string]func(c *frontend.Client, i int) error{
		"invalidate": func(c *frontend.Client, _ int) error {
			return c.IOTLB(vhostuser.IOTLBMsg{Size: 1<<64 - 1, Type: vhostuser.IOTLBInvalidate})
		},
		// As many entries as are kept, each of which contradicts the one before.
		"update": func(c *frontend.Client, i int) error {
			uva := c.Mem.Regions[i/9000%2].UVA
			return c.IOTLB(vhostuser.IOTLBMsg{IOVA: 1<<56 + uint64(i%9000), Size: 1, UVA: uva, Perm: 3, Type: vhostuser.IOTLBUpdate})
		},
		"memory": func(c *frontend.Client, _ int) error { return c.SetMemory(c.Mem) },
	} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, true)
			_, good := d.guest("good", frontend.Options{})
			c, p := d.guest("evil", frontend.Options{IOMMU: &frontend.IOMMU{}})
			for i := range 4 {
				_, err := c.StartPair(i)
				must(t, err)
			}
			_, err := p.PostRx(16)
			must(t, err)
			must(t, p.SendTx(virtio.NetHdr{}, make([]byte, 60), frontend.Indirect))
			var i atomic.Int64
			repeat(t, func() error { return flood(c, int(i.Add(1))) })
			w := worst(t, good, 700*time.Millisecond)
			t.Logf("%v, %d rounds", w, i.Load())
			if w > 500*time.Millisecond {
				t.Errorf("the good guest waited for %v", w)
			}
		})
	}
}

// TestReconnects: a front-end that comes and goes, and whose memory vanishes, costs the others nothing but time.
func TestReconnects(t *testing.T) {
	d := serve(t, true)
	_, good := d.guest("good", frontend.Options{})
	var rounds atomic.Int64
	repeat(t, func() error {
		round := rounds.Add(1)
		mem, err := frontend.NewMemory(8 << 20)
		if err != nil {
			return err
		}
		defer mem.Close()
		c, err := frontend.Connect(filepath.Join(d.dir, "evil"), mem, frontend.Options{Features: features, RingSize: 64})
		if err != nil {
			return nil
		}
		defer c.Close()
		p, err := c.StartPair(0)
		if err != nil || c.Sync() != nil {
			return nil
		}
		if round%2 == 0 {
			_ = unix.Ftruncate(mem.Regions[0].FD, 0)
			_ = p.TX.Kick()
			_ = c.Sync()
		}
		return nil
	})
	w := worst(t, good, 2*time.Second)
	t.Logf("%v, %d rounds", w, rounds.Load())
	if w > 500*time.Millisecond {
		t.Errorf("the good guest waited for %v", w)
	}
}

// TestStopWithHangingPeers: neither half a message nor a peer that reads nothing delays the end.
func TestStopWithHangingPeers(t *testing.T) {
	d := serve(t, true)
	half, err := frontend.Dial(filepath.Join(d.dir, "good"))
	must(t, err)
	defer half.Close()
	must(t, half.SendRaw(vhostuser.Header{Request: vhostuser.ReqSetMemTable, Flags: 1, Size: 40}.Append(nil)[:7]))
	deaf, err := frontend.Dial(filepath.Join(d.dir, "evil"))
	must(t, err)
	defer deaf.Close()
	deaf.Timeout = 200 * time.Millisecond
	for deaf.Send(vhostuser.ReqGetFeatures, 1, nil) == nil { // until both directions are full
	}
	begin := time.Now()
	must(t, d.Stop(patience))
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("the end took %v", took)
	}
}
