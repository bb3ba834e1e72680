package hostile

import (
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// attacker does its worst until stop is closed.
type attacker func(t *testing.T, d *vhostd, stop chan struct{})

var attackers = []struct {
	name string
	run  attacker
}{
	{"descriptor loops", ringAttack(func(t *testing.T, c *frontend.Client, p *frontend.Pair, stop chan struct{}) {
		p.TX.Ring.PokeDesc(0, 0, 1, driver.DescFNext, 0)
		feed(p.TX, stop)
	})},
	{"refilling as fast as emptied", ringAttack(func(t *testing.T, c *frontend.Client, p *frontend.Pair, stop chan struct{}) {
		p.TX.Ring.PokeDesc(0, 32<<20, 12+1514, 0, 0)
		p.RX.Ring.PokeDesc(0, 33<<20, 2048, driver.DescFWrite, 0)
		go feed(p.RX, stop)
		feed(p.TX, stop)
	})},
	{"tiny frames", ringAttack(func(t *testing.T, c *frontend.Client, p *frontend.Pair, stop chan struct{}) {
		p.TX.Ring.PokeDesc(0, 32<<20, 12+14, 0, 0)
		p.RX.Ring.PokeDesc(0, 33<<20, 2048, driver.DescFWrite, 0)
		go feed(p.RX, stop)
		feed(p.TX, stop)
	})},
	{"kick storm", ringAttack(func(t *testing.T, c *frontend.Client, p *frontend.Pair, stop chan struct{}) {
		for !closed(stop) {
			_, _ = p.TX.Kick(), p.RX.Kick()
		}
	})},
	{"tables of 32768 entries", ringAttack(func(t *testing.T, c *frontend.Client, p *frontend.Pair, stop chan struct{}) {
		const entries = 32768
		at, err := c.Mem.Alloc(0, 16*entries, 16)
		must(t, err)
		table(t, c.Mem, at, entries, 0, 1)
		p.TX.Ring.PokeDesc(0, at, 16*entries, driver.DescFIndirect, 0)
		feed(p.TX, stop)
	})},
	{"broken rings", ringAttack(func(t *testing.T, c *frontend.Client, p *frontend.Pair, stop chan struct{}) {
		for !closed(stop) {
			p.TX.Ring.PokeAvailIdx(p.TX.Ring.PeekUsedIdx() + 5000)
			must(t, p.TX.Kick())
			must(t, p.TX.WaitErr(patience))
			_, _, err := c.Stop(0)
			must(t, err)
			p.TX.Ring.Reset(0)
			_, err = c.StartPair(0)
			must(t, err)
			must(t, c.Sync())
		}
	})},
	{"reconnecting", func(t *testing.T, d *vhostd, stop chan struct{}) {
		mem := memory(t, 64<<20, 64<<20)
		for !closed(stop) {
			if c, err := frontend.Connect(filepath.Join(d.dir, "evil"), mem, frontend.Options{RingSize: 8}); err == nil {
				_, _ = c.StartPair(0)
				_ = c.Close()
			}
		}
	}},
}

// ringAttack attacks from a running queue pair.
func ringAttack(attack func(*testing.T, *frontend.Client, *frontend.Pair, chan struct{})) attacker {
	return func(t *testing.T, d *vhostd, stop chan struct{}) {
		c, p := d.guest("evil", frontend.Options{RingSize: 1024, TxBuf: 64, RxBuf: 64})
		defer c.Close()
		attack(t, c, p, stop)
	}
}

func closed(stop chan struct{}) bool {
	select {
	case <-stop:
		return true
	default:
		return false
	}
}

// TestHonestGuests measures what seven guests get while an eighth attacks, in turns with what they get while it does not. Their
// rates are limited, so that not the machine decides. Nothing is demanded: see docs/performance.md.
func TestHonestGuests(t *testing.T) {
	testmain.Long(t)
	runtime.GOMAXPROCS(16) // the kernel shares the processors out, not the runtime
	for _, a := range attackers {
		t.Run(a.name, func(t *testing.T) {
			d := serveHonest(t)
			h := newHonest(t, d)
			quiet, attacked := make([]sample, 0, 5), make([]sample, 0, 5)
			for range 5 {
				quiet = append(quiet, h.measure())
				stop, ended := make(chan struct{}), make(chan struct{})
				go func() {
					defer close(ended)
					runtime.LockOSThread() // which ends with the goroutine, and its priority with it
					_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 10)
					a.run(t, d, stop)
				}()
				time.Sleep(100 * time.Millisecond)
				attacked = append(attacked, h.measure())
				close(stop)
				<-ended
			}
			h.end(t)
			before, under := median(quiet), median(attacked)
			t.Logf("%.2f of the throughput: %.0f of %.0f frames per second; way there and back: middle %v instead of %v, 99 in 100 within %v instead of %v",
				under.rate/before.rate, under.rate, before.rate, under.p50, before.p50, under.p99, before.p99)
		})
	}
}

const honestPairs = 7

// serveHonest serves four guests that receive 5000 frames a second, three that send to themselves, and evil, all on one worker.
func serveHonest(t *testing.T) *vhostd {
	guests := []string{}
	for i := range honestPairs {
		network := "echo"
		if i < 4 {
			network = "source,rate=5000"
		}
		guests = append(guests, fmt.Sprintf("{name: good%d, socket: %%s/good%d, network: %q}", i, i, network))
	}
	return serveGuests(t, false, append(guests, "{name: evil, socket: %s/evil, network: echo}"))
}

// honest are the seven guests at work.
type honest struct {
	frames atomic.Uint64
	mu     sync.Mutex
	ways   []time.Duration // since the last measurement
	stop   chan struct{}
	ended  sync.WaitGroup
}

type sample struct {
	rate     float64 // frames per second
	p50, p99 time.Duration
}

func newHonest(t *testing.T, d *vhostd) *honest {
	h := &honest{stop: make(chan struct{})}
	for i := range honestPairs {
		_, p := d.guest(fmt.Sprint("good", i), frontend.Options{})
		h.ended.Go(func() {
			var err error
			for err == nil && !closed(h.stop) {
				if i < 4 {
					err = h.receive(p)
				} else {
					err = h.ping(p)
				}
			}
			if err != nil {
				t.Errorf("guest good%d: %v", i, err)
			}
		})
	}
	return h
}

func (h *honest) receive(p *frontend.Pair) error {
	if _, err := p.PostRx(256); err != nil {
		return err
	}
	if _, _, err := p.RecvFrame(patience); err != nil {
		return err
	}
	h.frames.Add(1)
	return nil
}

// ping sends a frame to the guest itself, and the next one a millisecond later.
func (h *honest) ping(p *frontend.Pair) error {
	begin := time.Now()
	if _, err := p.PostRx(4); err != nil {
		return err
	}
	if err := p.SendTx(virtio.NetHdr{}, make([]byte, 60), frontend.Direct); err != nil {
		return err
	}
	if _, _, err := p.RecvFrame(patience); err != nil {
		return err
	}
	way := time.Since(begin)
	h.frames.Add(1)
	h.mu.Lock()
	h.ways = append(h.ways, way)
	h.mu.Unlock()
	time.Sleep(time.Millisecond - way)
	return nil
}

// measure watches the guests for a second.
func (h *honest) measure() sample {
	h.mu.Lock()
	h.ways = h.ways[:0]
	h.mu.Unlock()
	begin, from := time.Now(), h.frames.Load()
	time.Sleep(time.Second)
	s := sample{rate: float64(h.frames.Load()-from) / time.Since(begin).Seconds()}
	h.mu.Lock()
	defer h.mu.Unlock()
	slices.Sort(h.ways)
	if n := len(h.ways); n > 0 {
		s.p50, s.p99 = h.ways[n/2], h.ways[n*99/100]
	}
	return s
}

func (h *honest) end(t *testing.T) {
	t.Helper()
	close(h.stop)
	h.ended.Wait()
}

// median takes each figure's own.
func median(samples []sample) (m sample) {
	middle := func(less func(a, b sample) int) sample {
		s := slices.SortedFunc(slices.Values(samples), less)
		return s[len(s)/2]
	}
	m.rate = middle(func(a, b sample) int { return int(a.rate - b.rate) }).rate
	m.p50 = middle(func(a, b sample) int { return int(a.p50 - b.p50) }).p50
	m.p99 = middle(func(a, b sample) int { return int(a.p99 - b.p99) }).p99
	return m
}
