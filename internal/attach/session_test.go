package attach

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

// TestFrames: frames of all sizes cross in both directions unharmed, under every set of features that changes how.
func TestFrames(t *testing.T) {
	for name, offered := range map[string]virtio.Features{
		"everything":           allFeatures,
		"nothing":              0,
		"without protocol":     allFeatures &^ virtio.FVhostUserProtocolFeatures,
		"without merging":      allFeatures &^ virtio.FNetMrgRxBuf,
		"without offloads":     allFeatures &^ (sendWishes | recvWishes),
		"without event index":  allFeatures &^ virtio.FRingEventIdx,
		"legacy":               allFeatures &^ (virtio.FVersion1 | virtio.FAnyLayout),
		"legacy, header alone": virtio.FNetCSum,
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.features = offered
			f.listen()
			wakes := map[string]worker.Wake{"nothing": worker.Poll, "everything": worker.Adaptive, "legacy": worker.Poll}
			a := f.attach(func(o *Options) { o.Wake = wakes[name] })
			random := rand.NewChaCha8([32]byte{1})
			for _, n := range []int{14, 60, 1514, 1518} {
				frame := make([]byte, n)
				_, _ = random.Read(frame)
				crossFrame(t, f, a, frame)
			}
			const bytes = 14 + 60 + 1514 + 1518
			eventually(t, "frames and bytes are counted", func() bool {
				s, r := &a.counts.sent, &a.counts.received
				return s.frames.Load() == 4 && r.frames.Load() == 4 && s.bytes.Load() == bytes && r.bytes.Load() == bytes
			})
		})
	}
}

// crossFrame moves a frame from the namespace to the back-end and another from there.
func crossFrame(t *testing.T, f *fake, a *attached, frame []byte) {
	t.Helper()
	hdrLen := a.features.NetHdrLen()
	if _, err := unix.Write(a.namespace, append(bytes.Repeat([]byte{0xff}, hdrLen), frame...)); err != nil {
		t.Fatal(err)
	}
	tx := f.rings[1]
	head, got := tx.take()
	if a.features.Any(virtio.FVersion1 | virtio.FAnyLayout) {
		hdr := got[:hdrLen]
		if !a.features.Has(virtio.FNetCSum) && !bytes.Equal(hdr, make([]byte, hdrLen)) || hdr[0]&^virtio.HdrFNeedsCsum != 0 {
			t.Errorf("header % x", hdr)
		}
		if !bytes.Equal(got[hdrLen:], frame) {
			t.Errorf("sent %d bytes, the back-end got %d", len(frame), len(got)-hdrLen)
		}
	} else if len(got) != hdrLen {
		t.Errorf("the first descriptor of a legacy device has %d bytes", len(got))
	}
	tx.use(uint32(head), 0)
	tx.publish()
	if !a.features.Any(virtio.FVersion1 | virtio.FAnyLayout) {
		f.deliverApart(frame, hdrLen, a.features.Has(virtio.FNetMrgRxBuf))
	} else if hdrLen == virtio.NetHdrLen {
		f.rings[0].deliver(virtio.NetHdr{NumBuffers: 1}, frame, hdrLen+len(frame))
	} else {
		rx := f.rings[0]
		head, data := rx.take()
		clear(data[:hdrLen])
		rx.use(uint32(head), uint32(hdrLen+copy(data[hdrLen:], frame)))
		rx.publish()
	}
	if _, got := a.frame(t); !bytes.Equal(got, frame) {
		t.Errorf("the back-end sent %d bytes, the namespace got %d", len(frame), len(got))
	}
}

// deliverApart writes a frame into a chain of two descriptors, whose memory lies together.
func (f *fake) deliverApart(frame []byte, hdrLen int, merges bool) {
	rx := f.rings[0]
	head, data := rx.take()
	clear(data)
	if merges {
		data[10] = 1
	}
	whole := data[: hdrLen+len(frame) : cap(data)]
	rx.use(uint32(head), uint32(hdrLen+copy(whole[hdrLen:], frame)))
	rx.publish()
}

// TestMergedFrames: a frame in many buffers arrives whole.
func TestMergedFrames(t *testing.T) {
	f := newFake(t)
	f.listen()
	a := f.attach(nil)
	frame := make([]byte, 40000)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(frame)
	header := virtio.NetHdr{NumBuffers: 4, Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv4, GSOSize: 1448, HdrLen: 66,
		CsumStart: 34, CsumOffset: 16}
	f.rings[0].deliver(header, frame, 16<<10, 1, 16<<10, 40000+12-2*(16<<10)-1)
	got, b := a.frame(t)
	header.NumBuffers = 0
	if !bytes.Equal(b, frame) || got != header {
		t.Errorf("%d bytes with %+v", len(b), got)
	}
}

// TestFullRing: frames wait in the tap while the back-end does not use any, and none is lost.
func TestFullRing(t *testing.T) {
	f := newFake(t)
	f.listen()
	a := f.attach(func(o *Options) { o.RingSize, o.Wake = 16, worker.Block })
	const n = 50
	for i := range n {
		sendFrame(t, a, 60+i)
	}
	tx := f.rings[1]
	for i := range n {
		head, got := tx.take()
		if len(got) != virtio.NetHdrLen+60+i {
			t.Fatalf("frame %d has %d bytes", i, len(got))
		}
		tx.use(uint32(head), 0)
		tx.publish()
	}
	if a.counts.sent.frames.Load() != n {
		t.Errorf("%d frames counted", a.counts.sent.frames.Load())
	}
}

// TestUnderWay: frames that a back-end had when it went away are counted.
func TestUnderWay(t *testing.T) {
	f := newFake(t)
	f.listen()
	a := f.attach(nil)
	for range 5 {
		sendFrame(t, a, 100)
	}
	for i := range 5 {
		if head, _ := f.rings[1].take(); i < 2 {
			f.rings[1].use(uint32(head), 0)
		}
	}
	f.rings[1].publish()
	a.leave()
	if err := a.finish(); err != nil {
		t.Error(err)
	}
	a.running[0].abandon()
	if n := a.counts.sent.drops[underWay].Load(); n != 3 {
		t.Errorf("%d frames under way, want 3", n)
	}
}

// TestLongFrames: what no frame can be is counted.
func TestLongFrames(t *testing.T) {
	f := newFake(t)
	f.listen()
	a := f.attach(nil)
	sendFrame(t, a, 13)
	sendFrame(t, a, virtio.MaxFrame+1)
	sendFrame(t, a, virtio.MaxFrame)
	if _, got := f.rings[1].take(); len(got) != virtio.NetHdrLen+virtio.MaxFrame {
		t.Errorf("%d bytes", len(got))
	}
	if s := &a.counts.sent; s.drops[tooShort].Load() != 1 || s.drops[tooLong].Load() != 1 {
		t.Errorf("%v", &s.drops)
	}
}

// TestInterfaceGone: a tap that cannot be used any more ends the session for good.
func TestInterfaceGone(t *testing.T) {
	if !fatal(localError{errors.New("x")}) || !fatal(errors.Join(errDeleted, nil)) || fatal(errors.New("y")) {
		t.Error("which errors end an attachment")
	}
	for _, errno := range []unix.Errno{unix.EBADFD, unix.ENODEV} {
		if !gone(errno) {
			t.Errorf("%v", errno)
		}
	}
}

func TestNegotiation(t *testing.T) {
	f := newFake(t)
	f.listen()
	a := f.attach(func(o *Options) { o.QueuePairs = 2 })
	if a.mac.String() != "52:54:00:01:02:03" || a.mtu != 1400 || a.pairs != 2 {
		t.Errorf("%v %d %d", a.mac, a.mtu, a.pairs)
	}
	silent := newFake(t)
	silent.script = func(c *frontend.Conn, m frontend.Reply) (bool, bool) {
		if m.Request != vhostuser.ReqGetConfig {
			return false, false
		}
		reply(c, m, nil)
		return true, false
	}
	silent.listen()
	if a := silent.attach(nil); a.mac != nil || a.mtu != 0 || a.features.Any(virtio.FNetMAC|virtio.FNetMTU) {
		t.Errorf("without a configuration: %v %d %v", a.mac, a.mtu, a.features)
	}
	high := newFake(t)
	high.listen()
	if a := high.attach(func(o *Options) { o.MTU = 1500 }); a.features.Any(virtio.FNetMTU) {
		t.Errorf("an MTU above the device's is promised to stay below: %v", a.features)
	}
	for what, wrong := range map[string]virtio.NetConfig{
		"zeros":     {},
		"multicast": {MAC: [6]byte{1, 0, 0, 0, 0, 1}, MTU: 67, MaxQueuePairs: 65535},
	} {
		f := newFake(t)
		f.config, f.queues = wrong.Encode(), 1<<63
		f.listen()
		if a := f.attach(func(o *Options) { o.QueuePairs = 2 }); a.mac != nil || a.mtu != 0 || a.pairs < 1 || a.pairs > 2 {
			t.Errorf("%s: %v %d %d", what, a.mac, a.mtu, a.pairs)
		}
	}
}

// TestFeaturesFollowOneAnother: no feature is acknowledged without what it needs, whatever is offered.
func TestFeaturesFollowOneAnother(t *testing.T) {
	for range 10000 {
		offered := virtio.Features(rand.Uint64())
		without := virtio.Features(rand.Uint64() & rand.Uint64() & rand.Uint64())
		f := choose(offered, &Options{Packed: true, QueuePairs: 1 + rand.IntN(2), Without: without})
		for feature, needs := range map[virtio.Features]virtio.Features{
			virtio.FNetHostTSO4: virtio.FNetCSum, virtio.FNetHostTSO6: virtio.FNetCSum, virtio.FNetHostECN: virtio.FNetHostTSO4,
			virtio.FNetGuestTSO4: virtio.FNetGuestCSum, virtio.FNetGuestTSO6: virtio.FNetGuestCSum, virtio.FRingPacked: virtio.FVersion1,
		} {
			if f.Has(feature) && !f.Has(needs) {
				t.Fatalf("%v without %v", f, needs)
			}
		}
		if f&^offered != 0 || tapOffloads(f)&unix.TUN_F_CSUM == 0 && tapOffloads(f) != 0 {
			t.Fatalf("%v of %v", f, offered)
		}
	}
}

func TestOptions(t *testing.T) {
	good := Options{Socket: "s", Netns: "n"}
	for want, change := range map[string]func(*Options){
		"--socket is missing":       func(o *Options) { o.Socket = "" },
		"at most 107":               func(o *Options) { o.Socket = strings.Repeat("x", 108) },
		"--netns is missing":        func(o *Options) { o.Netns = "" },
		`--ifname: "a b": accepted`: func(o *Options) { o.Interface = "a b" },
		`--ifname: "eth%d"`:         func(o *Options) { o.Interface = "eth%d" },
		"--queue-pairs: 65":         func(o *Options) { o.QueuePairs = 65 },
		"--ring-size: 100":          func(o *Options) { o.RingSize = 100 },
		"--mtu: 67":                 func(o *Options) { o.MTU = 67 },
		"--mac: 01:00:00:00:00:00":  func(o *Options) { o.MAC = net.HardwareAddr{1, 0, 0, 0, 0, 0} },
		"--spin: -1s":               func(o *Options) { o.Spin = -time.Second },
		"--address: 224.0.0.1/24":   func(o *Options) { o.Addresses = []netip.Prefix{netip.MustParsePrefix("224.0.0.1/24")} },
		"--gateway: 0.0.0.0":        func(o *Options) { o.Gateways = []netip.Addr{netip.IPv4Unspecified()} },
	} {
		o := good
		change(&o)
		_, err := Run(t.Context(), o)
		var refused *OptionError
		if !errors.As(err, &refused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestNamespaces(t *testing.T) {
	for text, want := range map[string]string{"web": "/run/netns/web", "17": "/proc/17/ns/net", "./x": "./x", "/a/b": "/a/b"} {
		if got := namespacePath(text); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
	for text, want := range map[string]string{
		"no-such-namespace": "no such file", "/proc/self/ns/uts": "no network namespace", "/etc/passwd": "no network namespace",
	} {
		if _, err := Run(t.Context(), Options{Socket: "s", Netns: text}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	fifo := t.TempDir() + "/fifo"
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openNamespace(fifo); err == nil {
		t.Error("a pipe is accepted")
	}
}

// TestNoBackEnd: without one there is an error that says so, and no interface.
func TestNoBackEnd(t *testing.T) {
	_, err := Run(t.Context(), Options{Socket: t.TempDir() + "/none", Netns: "/proc/self/ns/net"})
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "no back-end listens there") {
		t.Error(err)
	}
}

// TestAllocatesNothing pins the steady state of both directions.
func TestAllocatesNothing(t *testing.T) {
	f := newFake(t)
	f.listen()
	a := f.attach(func(o *Options) { o.Wake = worker.Poll })
	p := a.running[0]
	frame, in := make([]byte, 1500), make([]byte, 2000)
	p.loop.Do(func() { p.loop.Remove(p) }) // its turns are taken below
	tx, rx := f.rings[1], f.rings[0]
	var allocs float64
	p.loop.Do(func() {
		allocs = testing.AllocsPerRun(200, func() {
			_, _ = unix.Write(a.namespace, frame)
			p.Notify(tapReady)
			p.Run()
			head, _ := tx.pop()
			tx.use(uint32(head), 0)
			tx.publish()
			head, data := rx.pop()
			clear(data[:virtio.NetHdrLen])
			data[10] = 1
			rx.use(uint32(head), 1000)
			rx.publish()
			p.Run()
			p.Arm()
			_, _ = unix.Read(a.namespace, in)
		})
	})
	if allocs != 0 {
		t.Errorf("%v allocations for a frame each way", allocs)
	}
	if n := a.counts.received.frames.Load(); n < 200 {
		t.Errorf("%d frames", n)
	}
}
