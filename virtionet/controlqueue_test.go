package virtionet

import (
	"context"
	"log/slog"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
	"github.com/vhostd/vhostd/worker"
)

const wait = 10 * time.Second

// guest is a front-end that passes its control queue to a device with several pairs on
// two workers, through a real session.
type guest struct {
	*frontend.Client
	t     *testing.T
	dev   *Device
	port  *fakePort
	arena *pagemem.Arena
	loops []*worker.Loop
	pairs [4]*frontend.Pair
	q     *frontend.Queue
	end   func()
}

func newControlGuest(t *testing.T, wake worker.Wake, opts frontend.Options) *guest {
	t.Helper()
	g := &guest{t: t, port: newFakePort(), arena: must(pagemem.NewArena(pagemem.Config{Bytes: 32 << 20, Name: "test"}))}
	for range 2 {
		g.loops = append(g.loops, must(worker.New(worker.Options{Name: "w", CPU: -1, Wake: wake, Spin: 50 * time.Microsecond})))
	}
	g.dev = must(New(Options{
		Name: "g", Port: g.port, Arena: g.arena, Workers: g.loops, QueuePairs: 4, MAC: testMAC[:],
		Logger: slog.New(slog.DiscardHandler), OnFatal: func(error) { g.Conn.Close() },
	}))
	t.Cleanup(func() {
		g.end()
		for _, c := range []interface{ Close() error }{g.dev, g.port, g.loops[0], g.loops[1]} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		if n := g.arena.InUse(); n != 0 {
			t.Errorf("%d pages of the arena are still in use", n)
		}
		if err := g.arena.Close(); err != nil {
			t.Error(err)
		}
	})
	mem := must(frontend.NewMemory(32 << 20))
	t.Cleanup(func() { mem.Close() })
	g.connect(mem, opts)
	return g
}

func (g *guest) connect(mem *frontend.Memory, opts frontend.Options) {
	g.t.Helper()
	fds := must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socketpair")
		conns[i] = must(net.FileConn(f)).(*net.UnixConn)
		f.Close()
	}
	done := make(chan error, 1)
	go func() { done <- vhostuser.Serve(context.Background(), conns[0], g.dev, vhostuser.Options{}) }()
	if opts.Order == 0 {
		opts.Order = frontend.Crosvm
	}
	opts.RingSize = 16
	g.Client = frontend.NewClient(frontend.NewConn(conns[1]), opts)
	g.end = func() {
		g.Client.Close()
		<-done
	}
	g.check(g.Negotiate())
	g.check(g.SetMemory(mem))
}

func (g *guest) check(err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatal(err)
	}
}

// start starts all pairs and the control queue, as crosvm does.
func (g *guest) start() {
	g.t.Helper()
	var err error
	for i := range g.pairs {
		g.pairs[i], err = g.StartPair(i)
		g.check(err)
	}
	g.q, err = g.StartControl(4)
	g.check(err)
	g.check(g.Sync())
}

// command sends one command and wants the answer.
func (g *guest) command(want byte, class, command byte, data ...byte) {
	g.t.Helper()
	for _, layout := range []frontend.Layout{frontend.Direct, frontend.Chained, frontend.Indirect} {
		answer, n, err := g.q.Command(class, command, data, layout, wait)
		if err != nil || answer != want || n != 1 {
			g.t.Fatalf("class %d, command %d: answer %d, %d bytes, %v; want %d", class, command, answer, n, err, want)
		}
	}
}

// used reports which pairs receive.
func (g *guest) used() (pairs []int) {
	g.dev.control.Lock()
	defer g.dev.control.Unlock()
	for i, p := range g.dev.pairs {
		if p != nil {
			p.loop.Do(func() {
				if p.rx.enabled {
					pairs = append(pairs, i)
				}
			})
		}
	}
	return pairs
}

// TestControlQueue plays every class through a session, in both ring formats and with
// workers that sleep and that poll.
func TestControlQueue(t *testing.T) {
	for name, o := range map[string]struct {
		wake worker.Wake
		opts frontend.Options
	}{
		"crosvm":  {worker.Block, frontend.Options{}},
		"libkrun": {worker.Adaptive, frontend.Options{Order: frontend.Libkrun}},
		"polling": {worker.Poll, frontend.Options{}},
		"packed, in order": {worker.Block, frontend.Options{Features: allControl | virtio.FVersion1 | virtio.FRingPacked |
			virtio.FInOrder | virtio.FRingIndirectDesc}},
		"without event indexes": {worker.Block, frontend.Options{Features: allControl | virtio.FVersion1 | virtio.FRingIndirectDesc}},
	} {
		t.Run(name, func(t *testing.T) {
			g := newControlGuest(t, o.wake, o.opts)
			if g.QueueNum != 9 {
				t.Errorf("GET_QUEUE_NUM %d", g.QueueNum)
			}
			g.start()
			if u := g.used(); !slices.Equal(u, []int{0}) {
				t.Errorf("pairs %v receive before the driver has set a number", u)
			}
			g.command(virtio.CtrlOK, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 3, 0)
			if u := g.used(); !slices.Equal(u, []int{0, 1, 2}) {
				t.Errorf("pairs %v receive, 3 are used", u)
			}
			// The front-end's word and the driver's are independent: both are needed.
			g.check(g.Enable(1, false))
			g.check(g.Sync())
			if u := g.used(); !slices.Equal(u, []int{0, 2}) {
				t.Errorf("pairs %v receive with pair 1 disabled", u)
			}
			g.command(virtio.CtrlOK, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 1, 0)
			g.check(g.Enable(1, true))
			g.check(g.Sync())
			if u := g.used(); !slices.Equal(u, []int{0}) {
				t.Errorf("pairs %v receive, 1 is used", u)
			}
			g.command(virtio.CtrlOK, virtio.CtrlMAC, virtio.CtrlMACAddrSet, 2, 0, 0, 0, 0, 9)
			if c := g.dev.Config(); c[5] != 9 {
				t.Errorf("configuration space %x", c)
			}
			g.command(virtio.CtrlErr, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 5, 0)
			g.command(virtio.CtrlErr, 77, 0)
			g.command(virtio.CtrlOK, virtio.CtrlOffloads, virtio.CtrlOffloadsSet, 2, 0, 0, 0, 0, 0, 0, 0)
			p := g.first()
			p.loop.Do(func() {
				if want := g.Features &^ (virtio.GuestOffloads &^ virtio.FNetGuestCSum) &^ virtio.FVhostUserProtocolFeatures; p.features != want {
					t.Errorf("features %v, want %v", p.features, want)
				}
			})
			g.filtered()
			i := slices.IndexFunc(g.dev.Snapshot().Rings, func(r RingStats) bool { return r.Control })
			if r := g.dev.Snapshot().Rings[i]; r.Index != 8 || r.Packets == 0 || r.Drops["command_refused"] != 6 || !r.Started || !r.Enabled || r.Size != 16 {
				t.Errorf("control queue %+v", r)
			}
			g.restarted()
		})
	}
}

func (g *guest) first() *pair {
	g.dev.control.Lock()
	defer g.dev.control.Unlock()
	return g.dev.pairs[0]
}

// filtered turns promiscuous mode off and wants only its own frames to arrive.
func (g *guest) filtered() {
	g.t.Helper()
	g.command(virtio.CtrlOK, virtio.CtrlRX, virtio.CtrlRXPromisc, 0)
	g.command(virtio.CtrlOK, virtio.CtrlVLAN, virtio.CtrlVLANAdd, 5, 0)
	p := g.pairs[0]
	must(p.PostRx(8))
	to := func(last byte, tag ...byte) frame {
		b := pattern(80, int(last))
		copy(b, []byte{2, 0, 0, 0, 0, last})
		copy(b[12:], tag)
		return frame{data: b}
	}
	g.port.feed(to(8), to(9), to(9, 0x81, 0, 0, 6), to(9, 0x81, 0, 0, 5), to(10), to(9))
	for range 3 {
		_, got, err := p.RecvFrame(wait)
		if err != nil || got[5] != 9 || got[12] == 0x81 && got[15] != 5 {
			g.t.Fatalf("received %x: %v", got, err)
		}
	}
	eventuallyTrue(g.t, "3 frames were filtered", func() bool {
		return g.dev.Snapshot().Rings[0].Drops["rx_filter"] == 3
	})
}

func eventuallyTrue(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(wait); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: " + what)
		}
	}
}

// restarted stops the control queue and starts it again: where it was, what the driver
// has set stays; at its beginning it is a new driver's.
func (g *guest) restarted() {
	g.t.Helper()
	g.command(virtio.CtrlOK, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 2, 0)
	state := func() (pairs int, mac byte, filter bool) {
		p := g.first()
		p.loop.Do(func() { filter = p.filter != nil })
		return len(g.used()), g.dev.Config()[5], filter
	}
	restart := func(base uint32) {
		g.t.Helper()
		g.check(g.SetVringNum(8, 16))
		g.check(g.SetVringBase(8, base))
		g.check(g.SetVringAddr(g.q.Addr()))
		g.check(g.SetVringKick(8, g.q.KickFD))
		g.check(g.Sync())
	}
	base, err := g.GetVringBase(8)
	g.check(err)
	restart(base)
	if pairs, mac, filter := state(); pairs != 2 || mac != 9 || !filter {
		g.t.Errorf("after a pause: %d pairs, address %d, filter %v", pairs, mac, filter)
	}
	g.command(virtio.CtrlOK, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 2, 0)
	_, err = g.GetVringBase(8)
	g.check(err)
	fresh := uint32(0)
	if g.q.Ring == nil {
		fresh = 1<<15 | 1<<31
	}
	g.q.Driver.Reset(0)
	restart(fresh)
	if pairs, mac, filter := state(); pairs != 1 || mac != 1 || filter {
		g.t.Errorf("with a new driver: %d pairs, address %d, filter %v", pairs, mac, filter)
	}
}

// TestControlQueueHostile_B11_B15_B16: chains that make no sense come back, the queue and
// the pairs go on, and an impossible ring costs only the control queue.
func TestControlQueueHostile_B11_B15_B16(t *testing.T) {
	g := newControlGuest(t, worker.Block, frontend.Options{})
	g.start()
	g.check(g.SetVringErr(8, g.q.ErrFD)) // crosvm sends none
	at := must(g.Mem.Alloc(0, 1<<20, 4096))
	send := func(bufs ...driver.Buf) (written uint32) {
		t.Helper()
		must(g.q.Driver.AddChain(bufs))
		g.check(g.q.Flush())
		g.check(g.q.WaitUsed(wait))
		_, n, ok := g.q.Driver.GetUsed()
		if !ok {
			t.Fatal(g.q.Driver.Err())
		}
		return n
	}
	read := func(n uint32) driver.Buf { return driver.Buf{Addr: at, Len: n} }
	room := func(n uint32) driver.Buf { return driver.Buf{Addr: at + 1<<19, Len: n, Write: true} }
	answer := g.Mem.Bytes(at+1<<19, 8)
	for _, test := range []struct {
		name    string
		bufs    []driver.Buf
		written uint32
	}{
		{"no answer wanted", []driver.Buf{read(3)}, 0},
		{"answer of no bytes", []driver.Buf{read(3), room(0)}, 0},
		{"nothing but an answer", []driver.Buf{room(1)}, 1},
		{"one byte", []driver.Buf{read(1), room(1)}, 1},
		{"header alone", []driver.Buf{read(2), room(1)}, 1},
		{"no bytes at all", []driver.Buf{read(0), room(8)}, 1},
		{"readable behind writable", []driver.Buf{read(3), room(1), read(1)}, 0},
		{"half a mebibyte", []driver.Buf{read(1 << 19), room(1)}, 1},
		{"nearly 4 GiB", []driver.Buf{{Addr: at, Len: 1<<32 - 1}, room(1)}, 0},
		{"outside memory", []driver.Buf{{Addr: 1 << 40, Len: 3}, room(1)}, 0},
		{"answer outside memory", []driver.Buf{read(3), {Addr: ^uint64(0), Len: 2, Write: true}}, 0},
	} {
		copy(answer, "........")
		if n := send(test.bufs...); n != test.written {
			t.Errorf("%s: %d bytes written, want %d", test.name, n, test.written)
		}
		want := "........"
		if test.written > 0 {
			want = "\x01......."
		}
		if string(answer) != want {
			t.Errorf("%s: answer %q, want %q", test.name, answer, want)
		}
		g.command(virtio.CtrlOK, virtio.CtrlRX, virtio.CtrlRXAllMulti, 1)
	}
	// A loop: the chain's last descriptor refers back to its first.
	r := g.q.Ring
	r.PokeDesc(3, at, 2, driver.DescFNext, 3)
	r.PokeHead(3)
	r.Publish()
	g.check(g.q.Kick())
	eventuallyTrue(t, "the loop came back", func() bool { return r.PeekUsedIdx() == r.AvailIdx() })
	// An index that cannot be.
	r.PokeAvailIdx(r.AvailIdx() + 1000)
	g.check(g.q.Kick())
	g.check(g.q.WaitErr(wait))
	p := g.pairs[0]
	must(p.PostRx(2))
	g.port.feed(plain(60, 1))
	if _, _, err := p.RecvFrame(wait); err != nil {
		t.Errorf("pair 0 after the control queue broke: %v", err)
	}
	if _, err := g.GetVringBase(8); err != nil {
		t.Error(err)
	}
}

// TestControlQueueMemory: its memory may move under it, leave and come back, or vanish.
func TestControlQueueMemory(t *testing.T) {
	g := newControlGuest(t, worker.Block, frontend.Options{})
	g.start()
	g.command(virtio.CtrlOK, virtio.CtrlRX, virtio.CtrlRXPromisc, 1)
	g.check(g.SetMemory(g.Mem))
	g.command(virtio.CtrlOK, virtio.CtrlRX, virtio.CtrlRXPromisc, 1)
	other := must(frontend.NewMemory(1 << 20))
	defer other.Close()
	other.Regions[0].UVA += 1 << 41
	specs, fds := other.Table()
	g.check(g.SetMemTable(specs, fds))
	g.check(g.Sync())
	if _, _, err := g.q.Command(0, 0, []byte{1}, frontend.Direct, 50*time.Millisecond); err == nil {
		t.Error("a command was served although the queue's memory is gone")
	}
	g.check(g.SetMemory(g.Mem))
	g.check(g.Sync())
	g.check(g.q.WaitUsed(wait))
	if _, _, ok := g.q.Driver.GetUsed(); !ok {
		t.Error("the command that waited was not served")
	}
	g.check(g.SetVringEnable(8, false))
	g.check(g.Sync())
	if _, _, err := g.q.Command(0, 0, []byte{1}, frontend.Direct, 50*time.Millisecond); err == nil {
		t.Error("a disabled control queue was served")
	}
	g.check(g.SetVringEnable(8, true))
	g.check(g.q.WaitUsed(wait))
}

// TestControlQueueUnderCommands_C50: resets, stops and disconnects come while commands flow.
func TestControlQueueUnderCommands_C50(t *testing.T) {
	g := newControlGuest(t, worker.Block, frontend.Options{})
	for round := range 40 {
		g.start()
		q := g.q
		for i := range 5 {
			must(q.Driver.AddChain([]driver.Buf{{Addr: q.Addr().Log + 4096*4, Len: uint32(i)}, {Addr: q.Addr().Log + 4096*4 + 64, Len: 1, Write: true}}))
		}
		g.check(q.Flush())
		switch round % 3 {
		case 0:
			g.check(g.Do(vhostuser.ReqResetDevice, nil))
			g.check(g.SetFeatures(g.Features))
		case 1:
			_, err := g.GetVringBase(8)
			g.check(err)
			for i := range 8 {
				_, err := g.GetVringBase(i)
				g.check(err)
			}
		case 2:
			mem := g.Mem
			g.end()
			g.connect(mem, frontend.Options{})
			continue
		}
		q.Driver.Reset(0)
		for _, p := range g.pairs {
			p.RX.Driver.Reset(0)
			p.TX.Driver.Reset(0)
		}
	}
	g.check(g.Sync())
}

// TestControlPace: a driver that floods the queue is slowed down, and stopping does not wait for it.
func TestControlPace(t *testing.T) {
	var r rate
	quit := make(chan struct{})
	begin := time.Now()
	for range commandBurst + 20 {
		if !r.spend(quit) {
			t.Fatal("quit did not come")
		}
	}
	if d := time.Since(begin); d < 10*commandEvery {
		t.Errorf("%d commands took %v", commandBurst+20, d)
	}
	close(quit)
	r.left, r.last = 0, time.Now()
	for i := range 100 {
		if !r.spend(quit) {
			return
		}
		if i == 99 {
			t.Error("quit was not noticed")
		}
	}
}

// keeper is a network that pins an address.
type keeper struct{ *fakePort }

func (keeper) MaySend(mac [6]byte) error {
	if mac != testMAC {
		return port.ErrClosed
	}
	return nil
}

// TestSetConfig_C81: who may write what.
func TestSetConfig_C81(t *testing.T) {
	loop := must(worker.New(worker.Options{Name: "w", CPU: -1}))
	defer loop.Close()
	p := newFakePort()
	defer p.Close()
	for _, test := range []struct {
		name      string
		port      port.Port
		acked     virtio.Features
		offset    int
		data      []byte
		migrating bool
		ok        bool
	}{
		{"legacy byte", p, 0, 5, []byte{7}, false, true},
		{"legacy, whole", p, virtio.FNetCtrlVQ, 0, []byte{2, 0, 0, 0, 0, 7}, false, true},
		{"legacy with the command", p, virtio.FNetCtrlMACAddr, 5, []byte{7}, false, false},
		{"modern", p, virtio.FVersion1, 5, []byte{7}, false, false},
		{"modern, what is there", p, virtio.FVersion1, 0, testMAC[:], false, true},
		{"modern, migrating", p, virtio.FVersion1, 5, []byte{7}, true, true},
		{"pinned", keeper{p}, 0, 5, []byte{7}, false, false},
		{"pinned, migrating", keeper{p}, 0, 5, []byte{7}, true, false},
		{"status", p, 0, 6, []byte{0}, false, false},
		{"status, migrating", p, 0, 6, []byte{0, 0}, true, true},
		{"pairs, migrating", p, 0, 8, []byte{9}, true, false},
		{"pairs as they are, migrating", p, 0, 8, []byte{2, 0}, true, true},
		{"beyond", p, 0, 20, make([]byte, 5), true, false},
		{"before", p, 0, -1, make([]byte, 1), true, false},
		{"huge", p, 0, 1 << 62, make([]byte, 1), true, false},
	} {
		d := must(New(Options{Port: test.port, Workers: []*worker.Loop{loop}, QueuePairs: 2, MAC: testMAC[:], Logger: slog.New(slog.DiscardHandler)}))
		if err := d.SetFeatures(test.acked); err != nil {
			t.Fatal(err)
		}
		before := d.Config()
		err := d.SetConfig(test.offset, test.data, test.migrating)
		if (err == nil) != test.ok {
			t.Errorf("%s: %v", test.name, err)
		}
		after := d.Config()
		if err != nil && !slices.Equal(before, after) {
			t.Errorf("%s: refused, but changed to %x", test.name, after)
		}
		if err == nil && test.offset < 6 && after[test.offset] != test.data[0] {
			t.Errorf("%s: not written: %x", test.name, after)
		}
		d.Reset()
		if mac := d.Config()[:6]; !slices.Equal(mac, testMAC[:]) {
			t.Errorf("%s: address %x after a reset", test.name, mac)
		}
	}
}

// TestLinkState: it is shown to who acknowledged that it exists.
func TestLinkState(t *testing.T) {
	loop := must(worker.New(worker.Options{Name: "w", CPU: -1}))
	defer loop.Close()
	p := newFakePort()
	defer p.Close()
	p.down.Store(true)
	d := must(New(Options{Port: p, Workers: []*worker.Loop{loop}, QueuePairs: 1, MAC: testMAC[:], Logger: slog.New(slog.DiscardHandler)}))
	if d.Config()[6] != virtio.NetStatusLinkUp {
		t.Error("down before the feature was acknowledged")
	}
	_ = d.SetFeatures(virtio.FNetStatus | virtio.FVersion1)
	if d.Config()[6] != 0 {
		t.Error("up although the network is down")
	}
	p.down.Store(false)
	if d.Config()[6] != virtio.NetStatusLinkUp {
		t.Error("down although the network is up")
	}
	d = must(New(Options{Port: p, Workers: []*worker.Loop{loop}, QueuePairs: 1, Logger: slog.New(slog.DiscardHandler)}))
	if d.Config() != nil || d.Features().Has(virtio.FNetStatus) {
		t.Error("a device without a configuration space offers STATUS")
	}
}
