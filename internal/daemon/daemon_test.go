package daemon

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtionet"
	"github.com/vhostd/vhostd/worker"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:"), testmain.Goroutines()))
}

// journal is a log that tests read.
type journal struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.b.Write(p)
}

func (j *journal) count(part string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Count(j.b.String(), part)
}

type rig struct {
	t      *testing.T
	daemon *Daemon
	arena  *pagemem.Arena
	log    *journal
	dir    string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	return newRigIn(t, "")
}

// newRigIn is newRig with a state directory.
func newRigIn(t *testing.T, state string) *rig {
	t.Helper()
	r := &rig{t: t, log: &journal{}, dir: t.TempDir()}
	var err error
	if r.arena, err = pagemem.NewArena(pagemem.Config{Bytes: 64 << 20, Name: "test"}); err != nil {
		t.Fatal(err)
	}
	logger := slog.New(slog.NewTextHandler(r.log, nil))
	w, err := worker.New(worker.Options{Name: "worker0", CPU: -1, Wake: worker.Block, Logger: logger})
	if err != nil {
		t.Fatal(err)
	}
	r.daemon = New(Options{Arena: r.arena, Workers: []*worker.Loop{w}, Logger: logger, Rings: RingState{Dir: state}})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := r.daemon.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
		w.Close()
		if n := r.arena.InUse(); n != 0 {
			t.Errorf("%d pages are still in use", n)
		}
		if err := r.arena.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *rig) path(name string) string { return filepath.Join(r.dir, name+".sock") }

func (r *rig) spec(name, network string) config.GuestSpec {
	r.t.Helper()
	g := config.DefaultGuest()
	g.Name, g.Socket, g.Network, g.QueuePairs = name, r.path(name), network, 1
	spec, err := g.Parse()
	if err != nil {
		r.t.Fatal(err)
	}
	return spec
}

func (r *rig) add(name, network string) {
	r.t.Helper()
	if err := r.daemon.Add(r.spec(name, network), Source{}); err != nil {
		r.t.Fatal(err)
	}
}

func newMemory(t *testing.T) *frontend.Memory {
	t.Helper()
	mem, err := frontend.NewMemory(8 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	return mem
}

func (r *rig) connect(name string) *frontend.Client {
	r.t.Helper()
	c, err := frontend.Connect(r.path(name), newMemory(r.t), frontend.Options{})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return c
}

// echo sends a frame and waits until it comes back.
func echo(t *testing.T, c *frontend.Client) {
	t.Helper()
	p, err := c.StartPair(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.PostRx(16); err != nil {
		t.Fatal(err)
	}
	frame := append([]byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5}, bytes.Repeat([]byte("x"), 50)...)
	if err := p.SendTx(virtio.NetHdr{}, frame, frontend.Direct); err != nil {
		t.Fatal(err)
	}
	_, got, err := p.RecvFrame(2 * time.Second)
	if err != nil || len(got) != len(frame) || got[5] != 2 {
		t.Fatalf("the frame came back as % x, %v", got, err)
	}
}

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 5 s: %s", what)
		}
	}
}

func (r *rig) guest(name string) GuestStatus {
	for _, g := range r.daemon.Status().Guests {
		if g.Name == name {
			return g
		}
	}
	return GuestStatus{}
}

// TestStatusFollowsSession is OPS-04: what is shown belongs to the present session or is empty.
func TestStatusFollowsSession(t *testing.T) {
	r := newRig(t)
	r.add("vm1", "echo")
	if g := r.guest("vm1"); g.State != StateWaiting || g.Connected || !g.NetworkUp {
		t.Errorf("before the session: %+v", g)
	}
	c := r.connect("vm1")
	echo(t, c)
	if err := c.Sync(); err != nil {
		t.Fatal(err)
	}
	g := r.guest("vm1")
	if g.State != "running" || !g.Connected || g.Peer == "" || len(g.Features) == 0 || g.MemoryRegions != 1 || len(g.Rings) != 2 {
		t.Errorf("during the session: %+v", g)
	}
	for _, ring := range g.Rings {
		if !ring.Started || !ring.Enabled || ring.Size != 256 || ring.Broken != "" {
			t.Errorf("ring %+v", ring)
		}
	}
	c.Close()
	eventually(t, "the status is empty", func() bool {
		g := r.guest("vm1")
		return g.State == StateWaiting && !g.Connected && g.Peer == "" && g.Features == nil && g.Rings == nil && g.MemoryRegions == 0
	})
	stats := r.daemon.Stats().Guests
	if len(stats) != 1 || stats[0].Connected || len(stats[0].Rings) != 2 {
		t.Fatalf("stats after the session: %+v", stats)
	}
	if rx, tx := stats[0].Rings[0], stats[0].Rings[1]; rx.Packets != 1 || tx.Packets != 1 || tx.Bytes != 64 {
		t.Errorf("counters are lost with the session: %+v", stats[0])
	}
}

// TestStatusReaders: many readers while front-ends come and go.
func TestStatusReaders(t *testing.T) {
	r := newRig(t)
	r.add("vm1", "echo")
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					r.daemon.Status()
					r.daemon.Stats()
				}
			}
		})
	}
	for range 20 {
		c := r.connect("vm1")
		echo(t, c)
		c.Close()
	}
	close(done)
	readers.Wait()
}

// TestPackedRings: packed rings of an odd size over the socket, stopped and started again, in several connections.
func TestPackedRings(t *testing.T) {
	r := newRig(t)
	r.add("vm1", "echo")
	const packed = virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FRingIndirectDesc | virtio.FRingPacked
	for _, features := range []virtio.Features{packed, packed | virtio.FRingEventIdx, packed | virtio.FInOrder} {
		c, err := frontend.Connect(r.path("vm1"), newMemory(t), frontend.Options{Features: features, RingSize: 33})
		if err != nil {
			t.Fatal(err)
		}
		for life := range 100 {
			echo(t, c)
			rx, tx, err := c.Stop(0)
			if place := uint16(life+1)%33 | (uint16(life+1)/33%2^1)<<15; err != nil || rx != place || tx != place {
				t.Fatalf("%v: life %d ended at %#x and %#x, %v, want %#x", features, life, rx, tx, err, place)
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		eventually(t, "the session is over", func() bool { return !r.guest("vm1").Connected })
	}
	if n := r.log.count("share=on"); n != 0 {
		t.Errorf("%d warnings about private memory", n)
	}
}

func TestOneFrontEndAtATime(t *testing.T) {
	r := newRig(t)
	r.add("vm1", "echo")
	first := r.connect("vm1")
	echo(t, first)
	second, err := frontend.Dial(r.path("vm1"))
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := second.AwaitClose(time.Second); err != nil {
		t.Error(err)
	}
	if r.log.count("front-end refused") != 1 {
		t.Errorf("log:\n%s", r.log.b.String())
	}
	echo(t, first)
	first.Close()
	// The restarted front-end does not wait for the teardown of its predecessor.
	echo(t, r.connect("vm1"))
}

// TestAlwaysServedAgain is RCN-08 and RCN-09: front-ends that come and go at any byte, the socket
// file stays the same.
func TestAlwaysServedAgain(t *testing.T) {
	r := newRig(t)
	r.add("vm1", "echo")
	before, err := os.Stat(r.path("vm1"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 200 {
		c, err := net.Dial("unix", r.path("vm1"))
		if err != nil {
			t.Fatal(err)
		}
		// A header is 12 bytes; the peer may leave in the middle of it.
		if _, err := c.Write([]byte{1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0}[:i%12]); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	echo(t, r.connect("vm1"))
	if after, err := os.Stat(r.path("vm1")); err != nil || !os.SameFile(before, after) {
		t.Errorf("the socket file changed: %v", err)
	}
	if n := r.log.count("level=WARN") + r.log.count("level=ERROR"); n != 0 {
		t.Errorf("%d complaints about front-ends that left:\n%s", n, r.log.b.String())
	}
}

func TestAddRefuses(t *testing.T) {
	r := newRig(t)
	r.add("vm1", "null")
	if err := r.daemon.Add(r.spec("vm1", "null"), Source{}); !errors.Is(err, ErrExists) {
		t.Errorf("same name: %v", err)
	}
	same := r.spec("vm2", "null")
	same.Socket = r.path("vm1")
	if err := r.daemon.Add(same, Source{}); !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), "belongs to guest vm1") {
		t.Errorf("same socket: %v", err)
	}
	if err := os.WriteFile(r.path("vm3"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.daemon.Add(r.spec("vm3", "echo"), Source{}); err == nil || !strings.Contains(err.Error(), "guest vm3: socket "+r.path("vm3")) {
		t.Errorf("occupied path: %v", err)
	}
	os.Remove(r.path("vm3"))
	r.add("vm3", "echo") // nothing of the failed attempt is in the way
	if err := r.daemon.Remove("vm9"); !errors.Is(err, ErrNotFound) {
		t.Errorf("unknown guest: %v", err)
	}
}

func TestConcurrentAddAndRemove(t *testing.T) {
	r := newRig(t)
	r.add("other", "echo")
	spec := r.spec("vm1", "null")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if err := r.daemon.Add(spec, Source{}); err != nil && !errors.Is(err, ErrExists) {
					t.Errorf("Add: %v", err)
				}
				if err := r.daemon.Remove("vm1"); err != nil && !errors.Is(err, ErrNotFound) {
					t.Errorf("Remove: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if _, err := os.Lstat(r.path("vm1")); err == nil {
		t.Error("the socket was left behind")
	}
	echo(t, r.connect("other"))
}

// TestRemoveWhilePeerLeaves is RCN-07: both teardowns at the same instant, and the name at once again.
func TestRemoveWhilePeerLeaves(t *testing.T) {
	r := newRig(t)
	for range 30 {
		r.add("vm1", "echo")
		c := r.connect("vm1")
		echo(t, c)
		var wg sync.WaitGroup
		wg.Go(func() { c.Close() })
		wg.Go(func() {
			start := time.Now()
			if err := r.daemon.Remove("vm1"); err != nil {
				t.Errorf("Remove: %v", err)
			}
			if d := time.Since(start); d > time.Second {
				t.Errorf("Remove took %v", d)
			}
		})
		wg.Wait()
	}
}

func TestAddAfterClose(t *testing.T) {
	r := newRig(t)
	r.add("vm1", "null")
	if err := r.daemon.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.daemon.Add(r.spec("vm2", "null"), Source{}); !errors.Is(err, ErrStopping) {
		t.Errorf("Add: %v", err)
	}
	if _, err := os.Lstat(r.path("vm1")); err == nil {
		t.Error("the socket was left behind")
	}
}

// TestChange changes a guest's allocator and copy policy while it is served; the counters and the status say so.
func TestChange(t *testing.T) {
	r := newRig(t)
	r.add("vm1", "echo")
	alloc, policy := virtionet.TxFragPool, virtionet.CopyAlways
	if _, err := r.daemon.Change("vm2", config.ChangeSpec{TxAlloc: &alloc}); !errors.Is(err, ErrNotFound) {
		t.Errorf("change of a guest that is not there: %v", err)
	}
	s, err := r.daemon.Change("vm1", config.ChangeSpec{TxAlloc: &alloc})
	if err != nil || s.TxAlloc != "fragpool" || s.Copy.Policy != "auto" {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err = r.daemon.Change("vm1", config.ChangeSpec{Copy: &policy}); err != nil || s.TxAlloc != "fragpool" || s.Copy.Policy != "always" {
		t.Errorf("%+v, %v", s, err)
	}
	if g := r.daemon.Status().Guests[0]; g.TxAlloc != "fragpool" || g.Copy != "always" {
		t.Errorf("status %+v", g)
	}
	if g := r.daemon.Stats().Guests[0]; g.TxAlloc != "fragpool" || g.Copy.Policy != "always" {
		t.Errorf("stats %+v", g)
	}
}
