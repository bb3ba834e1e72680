package vhostuser_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

const bit30 = virtio.FVhostUserProtocolFeatures

// isRefused says whether err is a non-zero acknowledgement.
func isRefused(err error) bool {
	var refused *frontend.RefusedError
	return errors.As(err, &refused)
}

func TestNEG01_EnableBeforeEverything(t *testing.T) {
	b := newBench(t, newDevice(2))
	mem := newMemory(t, 1<<20)
	b.must(b.SetOwner())
	b.must(b.SetProtocolFeatures(vhostuser.ProtoMQ | vhostuser.ProtoReplyAck))
	for range 2 {
		b.must(b.SetVringEnable(0, true))
		b.must(b.SetVringEnable(1, true))
	}
	b.must(b.SetFeatures(bit30 | virtio.FVersion1))
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	b.startRing(mem, 1, 0)
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		if len(d.running) != 2 || !d.running[0].Enabled || !d.running[1].Enabled {
			t.Errorf("running %+v, want rings 0 and 1 enabled", d.running)
		}
	})
	if p := b.session.State().Phase; p != "running" {
		t.Errorf("phase %q", p)
	}
}

func TestNEG01_EnableLast(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		if d.running[0].Enabled || d.enabled[0] {
			t.Error("ring 0 is enabled although nobody asked for it")
		}
	})
	b.must(b.SetVringEnable(0, true))
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		if !d.enabled[0] {
			t.Error("ring 0 is not enabled")
		}
	})
}

func TestNEG03_C48_FeaturesWhileRunning(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.must(b.SetVringEnable(0, true))
	b.startRing(mem, 0, 0)
	all := testFeatures | bit30
	b.must(b.SetFeatures(all))
	if err := b.SetFeatures(all &^ virtio.FNetMrgRxBuf); !isRefused(err) {
		t.Errorf("changed features on a running ring: %v", err)
	}
	b.must(b.SetFeatures(all | virtio.FVhostLogAll))
	if err := b.SetFeatures(all &^ virtio.FNetMrgRxBuf); !isRefused(err) {
		t.Errorf("changed features together with LOG_ALL on a running ring: %v", err)
	}
	b.must(b.SetFeatures(all))
	b.dev.peek(func(d *fakeDevice) {
		if len(d.acked) != 1 || len(d.starts) != 1 || len(d.running) != 1 {
			t.Errorf("features %v, starts %v, running %v", d.acked, d.starts, d.running)
		}
	})
	_, err := b.GetVringBase(0)
	b.must(err)
	b.must(b.SetFeatures(all &^ virtio.FNetMrgRxBuf))
	b.checkDevice()
}

// TestNEG04_ReplyFlags: exactly one reply, flags exactly 5, right size, with and
// without need_reply.
func TestNEG04_ReplyFlags(t *testing.T) {
	dev := newDevice(4)
	dev.config = make([]byte, 24)
	vring := vhostuser.VringState{Index: 1}.Append(nil)
	config := append(vhostuser.ConfigSpace{Size: 17, Flags: 1}.Append(nil), make([]byte, 17)...)
	for _, tt := range []struct {
		req     vhostuser.Request
		payload []byte
		size    int
	}{
		{vhostuser.ReqGetFeatures, nil, 8},
		{vhostuser.ReqGetProtocolFeatures, nil, 8},
		{vhostuser.ReqGetQueueNum, nil, 8},
		{vhostuser.ReqGetVringBase, vring, 8},
		{vhostuser.ReqGetStatus, nil, 8},
		{vhostuser.ReqGetConfig, config, 12 + 17},
		{vhostuser.ReqIOTLBMsg, make([]byte, 32), 8},
	} {
		for _, flags := range []uint32{1, 9} {
			t.Run(tt.req.String(), func(t *testing.T) {
				b := newBench(t, dev).negotiate()
				b.must(b.Send(tt.req, flags, tt.payload))
				r, err := b.Recv(time.Second)
				b.must(err)
				if r.Request != tt.req || r.Flags != 5 || len(r.Payload) != tt.size {
					t.Errorf("flags %#x: reply %+v", flags, r)
				}
				b.must(b.Sync()) // fails if a second reply comes first
			})
		}
	}
}

func TestNEG04_C12_NeedReplyOnlyIfNegotiated(t *testing.T) {
	b := newBench(t, newDevice(2))
	b.must(b.Send(vhostuser.ReqSetOwner, 9, nil))
	// The acknowledgement that this message turns on does not hold for itself.
	b.must(b.Send(vhostuser.ReqSetProtocolFeatures, 9, payload64(uint64(vhostuser.ProtoReplyAck))))
	b.must(b.Sync())
	b.must(b.DoAck(vhostuser.ReqSetOwner, nil))
	b.must(b.DoAck(vhostuser.ReqSetProtocolFeatures, payload64(0)))
	b.must(b.Send(vhostuser.ReqSetOwner, 9, nil))
	b.must(b.Sync())
}

// TestNEG06_Offer pins every bit that a front-end gets to see.
func TestNEG06_Offer(t *testing.T) {
	dev := newDevice(2)
	dev.features |= virtio.FAccessPlatform | virtio.FRingReset
	b := newBench(t, dev)
	f, err := b.GetFeatures()
	b.must(err)
	if want := testFeatures | virtio.FAccessPlatform | bit30 | virtio.FVhostLogAll; f != want {
		t.Errorf("features %v, want %v", f, want)
	}
	p, err := b.GetProtocolFeatures()
	b.must(err)
	const want = vhostuser.ProtoMQ | vhostuser.ProtoRARP | vhostuser.ProtoReplyAck | vhostuser.ProtoNetMTU | vhostuser.ProtoInflight | vhostuser.ProtoMemSlots | vhostuser.ProtoStatus |
		vhostuser.ProtoResetDevice | vhostuser.ProtoLogShmfd | vhostuser.ProtoDeviceState
	if p != want|vhostuser.ProtoBackendReq { // QEMU exits if ACCESS_PLATFORM comes without
		t.Errorf("protocol features %v, want %v and BACKEND_REQ", p, vhostuser.ProtocolFeatures(want))
	}
	dev = newDevice(2)
	dev.config = make([]byte, 24)
	b = newBench(t, dev)
	p, err = b.GetProtocolFeatures()
	b.must(err)
	if p != want|vhostuser.ProtoConfig {
		t.Errorf("protocol features with a configuration space %v", p)
	}
}

func TestNEG07_EnableNamesRings(t *testing.T) {
	b := newBench(t, newDevice(8))
	b.must(b.SetVringEnable(1, true)) // without MQ
	b.negotiate()
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	for i := range 8 {
		b.must(b.SetVringEnable(i, true))
		b.startRing(mem, i, 0)
	}
	b.must(b.SetVringEnable(3, false))
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		for i := range 8 {
			if d.enabled[i] != (i != 3) {
				t.Errorf("ring %d: enabled %v", i, d.enabled[i])
			}
		}
	})
}

func TestNEG12_QueueNum(t *testing.T) {
	for _, rings := range []int{2, 8, 256} {
		b := newBench(t, newDevice(rings)).negotiate()
		b.NeedReply = true
		n, err := b.GetQueueNum()
		b.must(err)
		want := min(256, rings+1) // the control queue is one
		if n != want {
			t.Errorf("GET_QUEUE_NUM %d, want %d", n, want)
		}
		last := min(256, 2*want) - 1
		b.must(b.SetVringNum(last, 64))
		if err := b.SetVringNum(last+1, 64); !isRefused(err) {
			t.Errorf("%d rings: ring %d: %v", rings, last+1, err)
		}
	}
}

func TestRCN05_FewerFeaturesAfterRestart(t *testing.T) {
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	b.Conn.Close()
	b.must(b.wait())

	dev.features &^= virtio.FNetMrgRxBuf
	b = newBench(t, dev)
	mem := newMemory(t, 1<<20)
	b.must(b.SetProtocolFeatures(vhostuser.ProtoReplyAck))
	b.must(b.SetFeatures(testFeatures | bit30))
	err := b.DoAck(vhostuser.ReqSetFeatures, payload64(uint64(testFeatures|bit30)))
	if !isRefused(err) {
		t.Errorf("features no longer offered: %v", err)
	}
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	b.must(b.Sync())
	if dev.isRunning(0) {
		t.Error("a half-working device: ring 0 runs without agreed features")
	}
	if b.logs.lines() != 1 || !strings.Contains(b.logs.String(), "MRG_RXBUF") {
		t.Errorf("want one line that names MRG_RXBUF, got %s", b.logs)
	}
}

func TestC48_UnofferedProtocolFeatures(t *testing.T) {
	b := newBench(t, newDevice(2))
	b.must(b.SetProtocolFeatures(vhostuser.ProtoReplyAck))
	b.NeedReply = true
	for _, p := range []vhostuser.ProtocolFeatures{vhostuser.ProtoInband, vhostuser.ProtoCrypto, 1 << 63} {
		if err := b.DoAck(vhostuser.ReqSetProtocolFeatures, payload64(uint64(p|vhostuser.ProtoReplyAck))); !isRefused(err) {
			t.Errorf("%v: %v", p, err)
		}
	}
	if got := b.session.State().ProtocolFeatures; !slices.Equal(got, []string{"REPLY_ACK"}) {
		t.Errorf("protocol features %v", got)
	}
}

// TestLegacyWithoutProtocolFeatures: then rings are enabled from the start.
func TestLegacyWithoutProtocolFeatures(t *testing.T) {
	b := newBench(t, newDevice(2))
	mem := newMemory(t, 1<<20)
	b.must(b.SetVringEnable(1, false))
	b.must(b.SetFeatures(virtio.FNetCSum))
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	b.startRing(mem, 1, 0)
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		if !d.running[0].Enabled || !d.enabled[1] {
			t.Errorf("running %+v, enabled %v", d.running, d.enabled)
		}
	})
}

func TestGetConfig_C81(t *testing.T) {
	dev := newDevice(2)
	dev.config = []byte("0123456789abcdefghijklmn")
	b := newBench(t, dev).negotiate()
	got, err := b.GetConfig(0, 17)
	b.must(err)
	if string(got) != "0123456789abcdefg" {
		t.Errorf("config %q", got)
	}
	got, err = b.GetConfig(20, 4)
	b.must(err)
	if string(got) != "klmn" {
		t.Errorf("config %q", got)
	}
	for _, c := range []vhostuser.ConfigSpace{{Offset: 21, Size: 4}, {Offset: 0xffffffff, Size: 4}, {Size: 0}, {Size: 257}, {Size: 25}} {
		reply, err := b.Call(vhostuser.ReqGetConfig, append(c.Append(nil), make([]byte, c.Size)...))
		b.must(err)
		if len(reply) != 0 {
			t.Errorf("%+v: reply of %d bytes, the empty one says error", c, len(reply))
		}
	}
	short := vhostuser.ConfigSpace{Size: 8}.Append(nil)
	reply, err := b.Call(vhostuser.ReqGetConfig, short)
	b.must(err)
	if len(reply) != 0 {
		t.Errorf("size beyond the payload: reply of %d bytes", len(reply))
	}
	b.NeedReply = true
	dev.peek(func(d *fakeDevice) { d.refuseConfig = errors.New("read-only") })
	for _, w := range []struct {
		offset, size, flags uint32
	}{{0, 1, 0}, {0, 1, 1}, {24, 1, 2}, {0xffffffff, 4, 2}, {0, 25, 2}, {0, 0, 2}, {0, 257, 2}, {0, 1, 4}} {
		if err := b.SetConfig(w.offset, make([]byte, w.size), w.flags); !isRefused(err) {
			t.Errorf("write %+v: %v", w, err)
		}
	}
	b.must(b.SetConfig(2, []byte("xy"), 2))
	if got, err = b.GetConfig(0, 5); err != nil || string(got) != "01xy4" {
		t.Errorf("config after a migration's write %q, %v", got, err)
	}
}

func TestNetExtras_C82_C83(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	for _, mtu := range []uint64{0, 67, 65536, 1 << 63} {
		if err := b.NetSetMTU(mtu); !isRefused(err) {
			t.Errorf("MTU %d: %v", mtu, err)
		}
	}
	b.must(b.NetSetMTU(68))
	b.must(b.NetSetMTU(9000))
	b.dev.peek(func(d *fakeDevice) { d.refuseMTU = errors.New("tap is smaller") })
	if err := b.NetSetMTU(1500); !isRefused(err) {
		t.Errorf("MTU that the device refuses: %v", err)
	}
	for _, mac := range [][6]byte{{}, {1, 0, 0x5e}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff}} {
		if err := b.SendRARP(mac); !isRefused(err) {
			t.Errorf("MAC %x: %v", mac, err)
		}
	}
	// As recorded: 52:54:00:12:34:56.
	b.must(b.DoAck(vhostuser.ReqSendRARP, payload64(0x563412005452)))
	b.dev.peek(func(d *fakeDevice) {
		if d.mtu != 9000 || !slices.Equal(d.macs, [][6]byte{{0x52, 0x54, 0, 0x12, 0x34, 0x56}}) {
			t.Errorf("mtu %d, announced %x", d.mtu, d.macs)
		}
	})
	for range 1000 {
		b.must(b.Send(vhostuser.ReqSendRARP, 1, payload64(0x563412005452)))
	}
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		if len(d.macs) > 100 {
			t.Errorf("%d of 1000 announcements went through", len(d.macs))
		}
	})
	b.checkDevice()
}

func TestStatus_C49_ZeroKeepsPositions(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 700)
	b.must(b.SetStatus(0xf))
	if v, err := b.GetStatus(); err != nil || v != 0xf {
		t.Errorf("status %#x, %v", v, err)
	}
	b.must(b.SetStatus(0))
	if base, err := b.GetVringBase(0); err != nil || base != 700 {
		t.Errorf("position %d after status 0, %v", base, err)
	}
	if err := b.DoAck(vhostuser.ReqSetStatus, payload64(0x100)); !isRefused(err) {
		t.Errorf("status 0x100: %v", err)
	}
	b.checkDevice()
}

// A message of a feature that was not acknowledged is refused; where an answer is
// obligatory the connection ends, or the front-end would wait for ever.
func TestFeatureNotAcknowledged(t *testing.T) {
	b := newBench(t, newDevice(2))
	b.must(b.SetProtocolFeatures(vhostuser.ProtoReplyAck))
	b.NeedReply = true
	if err := b.DoAck(vhostuser.ReqNetSetMTU, payload64(1500)); !isRefused(err) {
		t.Errorf("NET_SET_MTU: %v", err)
	}
	b.must(b.Send(vhostuser.ReqGetQueueNum, 1, nil))
	b.must(b.AwaitClose(time.Second))
	if err := b.wait(); err == nil || !strings.Contains(err.Error(), "protocol feature MQ") {
		t.Errorf("Serve returned %v", err)
	}
}

func TestState(t *testing.T) {
	b := newBench(t, newDevice(2))
	if s := b.session.State(); s.Phase != "connected" || !strings.HasPrefix(s.Peer, "pid ") || !strings.Contains(s.Peer, "(vhostuser") {
		t.Errorf("state %+v", s)
	}
	b.negotiate()
	s := b.session.State()
	if s.Phase != "negotiated" || !slices.Contains(s.Features, "MRG_RXBUF") || !slices.Contains(s.ProtocolFeatures, "STATUS") {
		t.Errorf("state %+v", s)
	}
	mem := newMemory(t, 1<<20, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 1, 5)
	b.must(b.Sync())
	s = b.session.State()
	if s.Phase != "running" || s.Regions != 2 || len(s.Rings) != 1 || s.Rings[0].Index != 1 || s.Rings[0].Size != 256 || !s.Rings[0].Started {
		t.Errorf("state %+v", s)
	}
	_, err := b.GetVringBase(1)
	b.must(err)
	if s := b.session.State(); s.Phase != "suspended" {
		t.Errorf("state %+v", s)
	}
}
