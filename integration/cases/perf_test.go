package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

func TestPERF01_NoProcessorTimeWithoutBuffers(t *testing.T) {
	for name, prepare := range map[string]func(*testing.T, *guest){
		"no buffers": func(*testing.T, *guest) {},
		"ring disabled": func(t *testing.T, g *guest) {
			_, err := g.PostRx(256)
			must(t, err)
			must(t, g.c.Enable(0, false))
			must(t, g.c.Sync())
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t, "source,rate=10000", ordinary())
			prepare(t, g)
			g.d.idle(0.1, time.Duration(rounds(1, 10))*time.Second)
			must(t, g.c.Enable(0, true))
			_, err := g.PostRx(256)
			must(t, err)
			begin := time.Now()
			if _, _, err := g.RecvFrame(patience); err != nil {
				t.Fatal(err)
			}
			soon(t, "the first frame came", begin)
		})
	}
}

func TestPERF05_OneCallForManyFrames(t *testing.T) {
	for name, opts := range suppression() {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t, "null", opts)
			n := rounds(100000, 1000000)
			frame, calls := frameOf(60, 1), uint64(0)
			for sent := 0; sent < n; {
				g.TX.Ring.EnableCalls() // at all times, as a driver does that does not care
				for g.Stage(virtio.NetHdr{}, frame, frontend.Direct) == nil {
					sent++
				}
				must(t, g.TX.Flush())
				must(t, g.TX.WaitUsed(patience))
			}
			must(t, g.DrainTx(patience))
			eventually(t, "all frames are counted", func() bool { return g.d.ring(1).Packets >= uint64(n) })
			calls = g.d.ring(1).Calls
			t.Logf("%d frames, %d calls", n, calls)
			if calls > uint64(n)/10 {
				t.Errorf("%d calls for %d frames, want at most a tenth", calls, n)
			}
		})
	}
}

// serveTwo serves two guests on one worker.
func serveTwo(t *testing.T, first, second string) (a, b *vhostd) {
	t.Helper()
	dir := t.TempDir()
	file, control := filepath.Join(dir, "config"), filepath.Join(dir, "control")
	paths := []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
	must(t, os.WriteFile(file, fmt.Appendf(nil, "control: %s\nguests:\n- {name: a, socket: %s, network: %q}\n- {name: b, socket: %s, network: %q}\n",
		control, paths[0], first, paths[1], second), 0o600))
	a = &vhostd{t: t, program: program, args: []string{"serve", "--config", file}, path: paths[0], control: control}
	a.start()
	return a, &vhostd{t: t, Process: a.Process, path: paths[1], control: control}
}

func TestPERF07_AGuestThatNeverStops(t *testing.T) {
	headers, frames := frameOf(0, 0), frameOf(60, 1)
	for name, frame := range map[string][]byte{"header-only chains": headers, "frames to itself": frames} {
		t.Run(name, func(t *testing.T) {
			a, b := serveTwo(t, "echo", "echo")
			flood := newFlood(t, a, frame)
			lone := b.guest(memory(t), ordinary())

			var turns []time.Duration
			for range 50 {
				begin := time.Now()
				_, err := lone.PostRx(1)
				must(t, err)
				must(t, lone.SendTx(virtio.NetHdr{}, frames, frontend.Direct))
				if _, _, err := lone.RecvFrame(patience); err != nil {
					t.Fatal(err)
				}
				turns = append(turns, time.Since(begin))
			}
			slices.Sort(turns)
			if turns[0] > 20*time.Millisecond {
				t.Errorf("a frame of the other guest takes %v at best, want 20 ms", turns[0])
			}
			t.Logf("other guest: %v at best, %v in the middle, %v at worst", turns[0], turns[25], turns[49])

			begin := time.Now()
			flood.stopRings(t)
			soon(t, "GET_VRING_BASE was answered", begin)
		})
	}
}

// TestPERF07_FairShare lets two guests flood one worker. The best of some periods tells: a front-end that the machine does not run
// sends nothing, a worker that does not share never does.
func TestPERF07_FairShare(t *testing.T) {
	a, b := serveTwo(t, "null", "null")
	first, second := newFlood(t, a, frameOf(60, 1)), newFlood(t, b, frameOf(60, 1))
	share := 0.0
	for period := 0; period < 20 && share < 0.4; period++ {
		from, to := first.sent.Load(), second.sent.Load()
		time.Sleep(200 * time.Millisecond)
		n, m := first.sent.Load()-from, second.sent.Load()-to
		share = max(share, float64(min(n, m))/float64(n+m))
		t.Logf("%d and %d frames", n, m)
	}
	if share < 0.4 {
		t.Errorf("one guest got %.0f %% of the worker at best, want 40 %%", 100*share)
	}
	first.stopRings(t)
	second.stopRings(t)
}

// flood is a guest that keeps its transmitq full all the time.
type flood struct {
	*guest
	sent atomic.Uint64
	quit chan struct{}
	done chan error
}

func newFlood(t *testing.T, d *vhostd, frame []byte) *flood {
	t.Helper()
	f := &flood{guest: d.guest(memory(t), ordinary()), quit: make(chan struct{}), done: make(chan error, 1)}
	go func() { f.done <- f.run(frame) }()
	stop := func() {
		select {
		case <-f.quit:
		default:
			close(f.quit)
		}
	}
	t.Cleanup(stop)
	eventually(t, "the flood runs", func() bool { return f.sent.Load() > 1000 })
	return f
}

func (f *flood) run(frame []byte) error {
	for {
		select {
		case <-f.quit:
			return nil
		default:
		}
		for range 32 {
			switch err := f.Stage(virtio.NetHdr{}, frame, frontend.Direct); err {
			case nil:
				f.sent.Add(1)
				continue
			case frontend.ErrFull:
			default:
				return err
			}
			break
		}
		if err := f.TX.Flush(); err != nil {
			return err
		}
		for _, _, ok, err := f.TryRecv(); ok || err != nil; _, _, ok, err = f.TryRecv() {
			if err != nil {
				return err
			}
		}
		if _, err := f.PostRx(256); err != nil {
			return err
		}
	}
}

// stopRings stops the flood's rings while it goes on, then the flood.
func (f *flood) stopRings(t *testing.T) {
	t.Helper()
	_, _, err := f.c.Stop(0)
	must(t, err)
	close(f.quit)
	must(t, <-f.done)
}
