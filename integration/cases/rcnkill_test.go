package cases

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// TestRCN01_KilledUnderLoad kills the back-end at any moment under load and starts it again. Frames are numbered. What was completed
// before, on either ring, is neither lost nor repeated, and each back-end goes on with the first frame that was not.
func TestRCN01_KilledUnderLoad(t *testing.T) {
	for _, c := range []struct {
		name     string
		features virtio.Features
		state    bool // --state-dir
		inflight bool // an inflight region
	}{
		{"split", plain, false, false},
		{"split, inflight", plain, false, true},
		{"split, in order, inflight", plain | virtio.FInOrder, false, true},
		{"packed, state", plain | virtio.FRingPacked, true, false},
		{"packed, in order, state", plain | virtio.FRingPacked | virtio.FInOrder, true, false},
		{"packed, inflight", plain | virtio.FRingPacked, false, true},
		{"packed, in order, inflight", plain | virtio.FRingPacked | virtio.FInOrder, false, true},
		{"packed, state and inflight", plain | virtio.FRingPacked, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := newKills(t, c.features, c.state, c.inflight)
			for range rounds(5, 50) {
				k.killUnderLoad()
			}
			k.finish()
		})
	}
}

// kills is a front-end whose back-ends are killed.
type kills struct {
	t        *testing.T
	d        *vhostd
	mem      *frontend.Memory
	opts     frontend.Options
	inflight *frontend.Inflight
	client   *frontend.Client
	pair     *frontend.Pair

	sent     uint64 // number of the next frame
	next     uint64 // number of the frame that has to come back next
	least    uint64 // the oldest frame with which the present back-end may have begun
	switched bool   // a frame of the present back-end came
	echoed   uint64
}

const killRing = 256

func newKills(t *testing.T, features virtio.Features, state, inflight bool) *kills {
	var flags []string
	if state {
		flags = []string{"--state-dir", stateDir(t)}
	}
	k := &kills{t: t, d: serve(t, "echo", flags...), mem: memory(t), switched: true}
	k.opts = frontend.Options{Features: features, RingSize: killRing, RxBuf: 700}
	k.client = k.d.connect(k.mem, k.opts)
	if inflight {
		in, err := k.client.GetInflightFD(2, killRing)
		must(t, err)
		k.inflight = &in
		t.Cleanup(func() { must(t, in.Close()) })
	}
	k.start()
	return k
}

// start starts the rings as they are.
func (k *kills) start() {
	k.t.Helper()
	if k.inflight != nil {
		must(k.t, k.client.SetInflightFD(*k.inflight))
	}
	k.pair = pair(k.t, k.client, 0)
}

// pump keeps both rings busy until done is closed.
func (k *kills) pump(done <-chan struct{}) {
	k.t.Helper()
	for {
		select {
		case <-done:
			return
		default:
		}
		_, err := k.pair.PostRx(killRing)
		must(k.t, err)
		for range 20 {
			err := k.pair.Stage(virtio.NetHdr{}, numbered(k.sent), frontend.Layout(k.sent%3))
			if errors.Is(err, frontend.ErrFull) {
				break
			}
			must(k.t, err)
			k.sent++
		}
		must(k.t, k.pair.TX.Flush())
		k.receive()
	}
}

// receive takes what came back. Within the life of one back-end the numbers follow each other. A new one begins with a frame that was
// not completed when the one before it ended, once what that one had delivered is seen.
func (k *kills) receive() {
	k.t.Helper()
	for {
		_, frame, ok, err := k.pair.TryRecv()
		must(k.t, err)
		if !ok {
			return
		}
		n := number(frame)
		if !bytes.Equal(frame, swapped(numbered(n))) {
			k.t.Fatalf("a damaged frame of %d bytes: % x", len(frame), head(frame))
		}
		if n != k.next {
			if k.switched || n < k.least || n >= k.sent {
				k.t.Fatalf("frame %d came instead of %d; %d were completed when the last back-end was killed (its successor was seen: %v), %d sent", n, k.next, k.least, k.switched, k.sent)
			}
			k.switched = true
		}
		k.next = n + 1
		k.echoed++
	}
}

// completed is how many frames the driver knows to be sent.
func (k *kills) completed() uint64 {
	k.t.Helper()
	_, err := k.pair.ReapTx()
	must(k.t, err)
	return k.sent - uint64(k.pair.TX.Driver.Outstanding())
}

func (k *kills) killUnderLoad() {
	k.t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		time.Sleep(2*time.Millisecond + rand.N(20*time.Millisecond))
		k.d.Kill()
	}()
	k.pump(done)
	k.d.check(k.d.Process)
	k.receive()
	k.least, k.switched = k.completed(), false
	left := k.pair.TX.Driver.Outstanding()
	k.client.Release()
	must(k.t, k.client.Close())
	k.d.start()
	k.client = k.d.connect(k.mem, k.opts)
	k.client.Adopt(k.pair)
	begin := time.Now()
	k.start()
	want := k.echoed + 1
	must(k.t, k.pair.TX.Flush())
	for end := begin.Add(patience); k.echoed < want; {
		if time.Now().After(end) {
			k.t.Fatalf("no frame after the restart; %d chains were left, %d are; vhostd:\n%s", left, k.pair.TX.Driver.Outstanding(), k.d.Output())
		}
		_, err := k.pair.PostRx(killRing)
		must(k.t, err)
		if err := k.pair.Stage(virtio.NetHdr{}, numbered(k.sent), frontend.Direct); err == nil {
			k.sent++
		}
		must(k.t, k.pair.TX.Flush())
		k.receive()
		time.Sleep(100 * time.Microsecond)
	}
	// Five times the limit are given to the race detector and to what else runs on the machine.
	if took := time.Since(begin); took > 5*time.Second {
		k.t.Errorf("frames flow %v after the front-end's new connection, want at most 1 s", took)
	}
}

// stateDir is a directory on a tmpfs.
func stateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "vhostd-state")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// finish demands that every frame is completed and that both rings have all their slots.
func (k *kills) finish() {
	k.t.Helper()
	for end := time.Now().Add(patience); k.pair.TX.Driver.Outstanding() > 0 || k.next != k.sent; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			k.t.Fatalf("%d frames sent, %d not completed, the last that came back is %d", k.sent, k.pair.TX.Driver.Outstanding(), k.next-1)
		}
		_, err := k.pair.PostRx(killRing)
		must(k.t, err)
		k.receive()
		k.completed()
	}
	_, err := k.pair.PostRx(killRing)
	must(k.t, err)
	if rx := k.pair.RX.Driver.Outstanding(); rx != killRing {
		k.t.Errorf("%d receive buffers can be posted, want %d", rx, killRing)
	}
	k.t.Logf("%d frames sent, %d came back", k.sent, k.echoed)
}

// TestRCN05_OfferIsStable: what is offered depends on the configuration alone, not on what the back-end before has left, nor on
// which front-end was there: QEMU drops the link of a guest whose features are no longer all offered.
func TestRCN05_OfferIsStable(t *testing.T) {
	d := serve(t, "echo", "--state-dir", stateDir(t))
	offer := func() (f virtio.Features, p vhostuser.ProtocolFeatures) {
		c := d.dial()
		f, err := c.GetFeatures()
		must(t, err)
		p, err = c.GetProtocolFeatures()
		must(t, err)
		must(t, c.Close())
		d.disconnected()
		return f, p
	}
	f, p := offer()
	mem := memory(t)
	for round := range 6 {
		features := plain
		if round%2 == 1 {
			features |= virtio.FRingPacked | virtio.FInOrder
		}
		c := d.connect(mem, frontend.Options{Features: features})
		flows(t, pair(t, c, 0))
		if round%3 != 2 {
			must(t, c.Close())
			d.disconnected()
		} else {
			d.kill()
			must(t, c.Close())
			d.start()
		}
		if now, proto := offer(); now != f || proto != p {
			t.Errorf("round %d: %v and %v are offered, were %v and %v", round, now, proto, f, p)
		}
	}
}

// TestRCN01_FrontEndComesBack: a front-end that loses its connection without having been told where its packed rings stopped comes
// back with the base of their start. No state directory is needed while the back-end lives.
func TestRCN01_FrontEndComesBack(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	opts := frontend.Options{Features: plain | virtio.FRingPacked}
	c := d.connect(mem, opts)
	p := pair(t, c, 0)
	for range rounds(5, 50) {
		for range 100 {
			flows(t, p)
		}
		c.Release()
		must(t, c.Close())
		d.disconnected()
		c = d.connect(mem, opts)
		c.Adopt(p)
		p = pair(t, c, 0)
	}
	flows(t, p)
}

// TestA11_InflightFileShrinks: a region whose file is cut short costs the connection that shared it, and nobody else anything.
func TestA11_InflightFileShrinks(t *testing.T) {
	d := serve(t, "echo")
	neighbor := d.neighbor()
	for _, features := range []virtio.Features{plain, plain | virtio.FRingPacked} {
		c := d.connect(memory(t), frontend.Options{Features: features})
		file, err := unix.MemfdCreate("inflight", unix.MFD_CLOEXEC)
		must(t, err)
		const size = 1 << 20
		must(t, unix.Ftruncate(file, size))
		in := frontend.Inflight{InflightDesc: vhostuser.InflightDesc{Size: size, Queues: 2, QueueSize: 256}, FD: file}
		must(t, c.SetInflightFD(in))
		p := pair(t, c, 0)
		flows(t, p)
		must(t, unix.Ftruncate(file, 0))
		must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
		must(t, c.AwaitClose(patience))
		must(t, c.Close())
		must(t, unix.Close(file))
		d.disconnected()
		flows(t, neighbor)
		d.serves()
		d.check(d.Process)
	}
}
