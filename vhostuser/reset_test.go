package vhostuser_test

import (
	"testing"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
)

func (b *bench) reset() error { return b.DoAck(vhostuser.ReqResetDevice, nil) }

// TestC50_ResetDevice: before features, while rings run, twice, and followed by a
// start as after connecting, with the memory that was shared before.
func TestC50_ResetDevice(t *testing.T) {
	b := newBench(t, newDevice(2))
	p, err := b.GetProtocolFeatures()
	b.must(err)
	b.must(b.SetProtocolFeatures(p))
	b.must(b.reset())
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	for round := range 3 {
		b.must(b.SetFeatures(bit30 | virtio.FVersion1))
		b.must(b.SetStatus(0xf))
		for i := range 2 {
			b.must(b.SetVringEnable(i, true))
			b.startRing(mem, i, 7)
		}
		b.must(b.Sync())
		if !b.dev.isRunning(0) || !b.dev.isRunning(1) {
			t.Fatalf("round %d: not running", round)
		}
		b.must(b.reset())
		b.must(b.reset())
		for i, r := range b.session.State().Rings {
			if r.Started || r.Enabled || r.Size != 0 || r.Base != 0 || r.HasKick || !r.HasCall {
				t.Errorf("round %d: ring %d after the reset: %+v", round, i, r)
			}
		}
		if s, err := b.GetStatus(); err != nil || s != 0 {
			t.Errorf("status %#x, %v", s, err)
		}
		if v, err := b.GetVringBase(0); err != nil || v != 0 {
			t.Errorf("position %d, %v", v, err)
		}
		if st := b.session.State(); st.Phase != "connected" || st.Regions != 1 || len(st.Features) != 0 {
			t.Errorf("after the reset: %+v", st)
		}
		// A kick alone starts nothing: everything has to be told again.
		b.must(b.SetVringKick(0, eventFD(t)))
		b.must(b.Sync())
		if b.dev.isRunning(0) {
			t.Fatal("a ring runs although the device was reset")
		}
	}
	b.dev.peek(func(d *fakeDevice) {
		if d.resets != 7 {
			t.Errorf("%d resets", d.resets)
		}
	})
	b.checkDevice()
}

// TestResetDeviceEnables: rings that features without bit 30 enabled are disabled,
// and a ring mentioned later is not enabled either.
func TestResetDeviceEnables(t *testing.T) {
	b := newBench(t, newDevice(2))
	b.must(b.SetProtocolFeatures(vhostuser.ProtoResetDevice | vhostuser.ProtoReplyAck))
	b.must(b.SetFeatures(virtio.FVersion1))
	b.must(b.SetVringNum(0, 64))
	b.must(b.reset())
	b.must(b.SetVringNum(1, 64))
	b.must(b.Sync())
	for i, r := range b.session.State().Rings {
		if r.Enabled {
			t.Errorf("ring %d is enabled", i)
		}
	}
	b.checkDevice()
}

// TestResetDeviceNotNegotiated: then the message is refused and changes nothing.
func TestResetDeviceNotNegotiated(t *testing.T) {
	b := newBench(t, newDevice(2))
	b.must(b.SetProtocolFeatures(vhostuser.ProtoReplyAck))
	b.must(b.SetFeatures(bit30 | virtio.FVersion1))
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	if err := b.reset(); !isRefused(err) {
		t.Errorf("reset without the feature: %v", err)
	}
	if !b.dev.isRunning(0) {
		t.Error("the ring was stopped")
	}
}
