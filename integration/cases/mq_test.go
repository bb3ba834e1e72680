package cases

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// TestMQ01_OnePairOfFour: a guest that uses fewer pairs than offered has its traffic, and may start another one later.
func TestMQ01_OnePairOfFour(t *testing.T) {
	d := serve(t, "echo", "--queue-pairs", "4")
	mem := memory(t)
	c := d.session(mem, plain)
	n, err := c.GetQueueNum()
	must(t, err)
	if n < 4 {
		t.Errorf("GET_QUEUE_NUM is %d for 4 pairs", n)
	}
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	flows(t, p)
	for _, r := range d.status().Rings {
		if r.Index > 1 {
			t.Errorf("ring %d, which nobody set up, is in the status: %+v", r.Index, r)
		}
	}
	late := detached(t, mem, 2, plain)
	steps(t, rings(c, late), on(c, 4, 5))
	flows(t, late)
	flows(t, p)
	started := map[int]bool{}
	for _, r := range d.status().Rings {
		started[r.Index] = r.Started
	}
	if len(started) != 4 || !started[0] || !started[1] || !started[4] || !started[5] {
		t.Errorf("started rings %v, want 0, 1, 4 and 5", started)
	}
}

// TestMQ03_DisabledPairs: with pairs configured and kicked but not enabled, as QEMU leaves those that its guest does not use,
// everything reaches the enabled one, and what is sent on the others is thrown away.
func TestMQ03_DisabledPairs(t *testing.T) {
	const pairs, wanted = 4, 600
	d := serve(t, fmt.Sprintf("source,rate=20000,flows=%d", wanted), "--queue-pairs", fmt.Sprint(pairs))
	mem := memory(t)
	c := d.session(mem, plain)
	var all [pairs]*frontend.Pair
	for i := range all {
		all[i] = detached(t, mem, i, plain)
		_, err := all[i].PostRx(64)
		must(t, err)
		steps(t, rings(c, all[i]))
		must(t, all[i].RX.Kick())
	}
	must(t, enable(c, true, 0, 1))
	seen := map[uint16]bool{}
	for len(seen) < wanted {
		_, frame, err := all[0].RecvFrame(patience)
		if err != nil {
			t.Fatalf("%d of %d flows arrived: %v", len(seen), wanted, err)
		}
		seen[binary.BigEndian.Uint16(frame[34:])] = true // UDP source port
		_, err = all[0].PostRx(64)
		must(t, err)
	}
	for _, p := range all[1:] {
		nothing(t, p.RX)
	}
	for i := 1; i < pairs; i++ { // one more at a time, and back, while the first receives
		p := all[i]
		must(t, enable(c, true, 2*i, 2*i+1))
		_, _, err := p.RecvFrame(patience)
		must(t, err)
		must(t, enable(c, false, 2*i, 2*i+1))
		for { // what was delivered before
			if _, _, err := p.RecvFrame(quiet); err != nil {
				break
			}
		}
		_, err = p.PostRx(64)
		must(t, err)
		nothing(t, p.RX)
		keepsReceiving(t, all[0])
	}
}

// keepsReceiving demands frames on a pair whose ring may be full of earlier ones.
func keepsReceiving(t *testing.T, p *frontend.Pair) {
	t.Helper()
	for range 300 {
		if _, _, err := p.RecvFrame(patience); err != nil {
			t.Fatal(err)
		}
		if _, err := p.PostRx(64); err != nil {
			t.Fatal(err)
		}
	}
}

// TestMQ03_DisabledTransmitIsConsumed: what a guest sends on a disabled ring is taken and reaches nobody; the ring works once it is
// enabled.
func TestMQ03_DisabledTransmitIsConsumed(t *testing.T) {
	d := serve(t, "echo", "--queue-pairs", "4")
	mem := memory(t)
	c := d.session(mem, plain)
	var all [4]*frontend.Pair
	for i := range all {
		all[i] = detached(t, mem, i, plain)
		steps(t, rings(c, all[i]))
	}
	must(t, enable(c, true, 0, 1))
	for i, p := range all {
		if i == 0 {
			flows(t, p)
			continue
		}
		_, err := p.PostRx(8)
		must(t, err)
		for range 300 { // more than the ring holds
			must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			must(t, p.DrainTx(patience))
		}
		nothing(t, p.RX)
		if n := d.ring(2*i + 1); n.Packets != 0 || n.Drops["queue_disabled"] != 300 {
			t.Errorf("ring %d: %+v, want 300 frames dropped as queue_disabled", 2*i+1, n)
		}
	}
	for i, p := range all {
		must(t, enable(c, true, 2*i, 2*i+1))
		flows(t, p)
	}
}

// TestMQ05_WithoutTheFeature: without VIRTIO_NET_F_MQ there is one pair, whatever the protocol feature says, and messages for other
// rings hold nothing up.
func TestMQ05_WithoutTheFeature(t *testing.T) {
	d := serve(t, "echo", "--queue-pairs", "4")
	mem := memory(t)
	const noMQ = plain &^ virtio.FNetMQ
	for name, protocol := range map[string]vhostuser.ProtocolFeatures{
		"protocol MQ": vhostuser.ProtoMQ | vhostuser.ProtoReplyAck, "neither": vhostuser.ProtoReplyAck,
	} {
		t.Run(name, func(t *testing.T) {
			c := d.dial()
			must(t, c.SetOwner())
			must(t, c.SetProtocolFeatures(protocol))
			c.NeedReply = true
			begin := time.Now()
			for range 2 {
				must(t, c.SetFeatures(noMQ|virtio.FVhostUserProtocolFeatures))
			}
			must(t, share(c, mem))
			p, extra := detached(t, mem, 0, noMQ), detached(t, mem, 1, noMQ)
			steps(t, rings(c, p), rings(c, extra), on(c, 0, 1, 2, 3))
			soon(t, "the control messages were answered", begin)
			flows(t, p)
			_, err := extra.PostRx(4)
			must(t, err)
			must(t, extra.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			nothing(t, extra.TX)
			flows(t, p)
			must(t, c.Close())
			d.disconnected()
		})
	}
}

// TestMQ07_HighestRing: the last of 128 pairs works alone beside the first, the idle ones cost no thread, and there is no more.
func TestMQ07_HighestRing(t *testing.T) {
	small := serve(t, "echo", "--queue-pairs", "1")
	small.serves()
	d := serve(t, "echo", "--queue-pairs", "128")
	mem := memory(t)
	c := d.session(mem, plain)
	begin, last := detached(t, mem, 0, plain), detached(t, mem, 127, plain)
	steps(t, rings(c, begin), rings(c, last), on(c, 0, 1, 254, 255))
	flows(t, begin)
	flows(t, last)
	if n := d.ring(255); n.Packets != 1 || n.Kicks == 0 {
		t.Errorf("ring 255: %+v, want one frame after a kick", n)
	}
	if got, want := d.use().threads, small.use().threads; got > want+4 {
		t.Errorf("%d threads with 128 pairs, %d with one", got, want)
	}
	d.idle(0.1, 300*time.Millisecond)
	for _, index := range []int{256, 257, 65536, 1<<32 - 1} {
		mustRefuse(t, fmt.Sprintf("ring %d", index), c.SetVringNum(index, 256))
		mustRefuse(t, fmt.Sprintf("ring %d", index), c.SetVringEnable(index, true))
	}
	flows(t, last)
}

// TestMQ07_EveryPair starts all 128 pairs, with small rings so that they fit.
func TestMQ07_EveryPair(t *testing.T) {
	d := serve(t, "echo", "--queue-pairs", "128")
	c := d.connect(memory(t, 256<<20), frontend.Options{Features: plain, RingSize: 16})
	var all [128]*frontend.Pair
	for i := range all {
		all[i] = pair(t, c, i)
	}
	for _, p := range all {
		flows(t, p)
	}
	for _, i := range []int{0, 64, 127} {
		flows(t, all[i])
	}
}
