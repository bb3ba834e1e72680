package vhostuser_test

import (
	"testing"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
)

// TestLibkrunReset_C52: libkrun resets with ENABLE 0 alone and configures again.
func TestLibkrunReset_C52(t *testing.T) {
	b := newBench(t, newDevice(2))
	mem := newMemory(t, 1<<20)
	b.must(b.SetProtocolFeatures(vhostuser.ProtoMQ))
	call := eventFD(t)
	for life := range 3 {
		b.must(b.SetOwner())
		b.shareMemory(mem)
		b.must(b.SetFeatures(bit30 | virtio.FVersion1 | virtio.Features(life&1)*virtio.FNetCSum))
		for i := range 2 {
			b.must(b.SetVringNum(i, 256))
			b.must(b.SetVringBase(i, 0))
			b.must(b.SetVringAddr(ringAddr(mem, i)))
			b.must(b.SetVringKick(i, eventFD(t)))
			b.must(b.SetVringCall(i, call))
			b.must(b.SetVringEnable(i, true))
		}
		b.must(b.Sync())
		b.dev.peek(func(d *fakeDevice) {
			if len(d.running) != 2 || len(d.starts) != 2*(life+1) || d.running[0].Base != 0 {
				t.Errorf("life %d: starts %v, running %+v", life, d.starts, d.running)
			}
			for i := range 2 {
				d.positions[i] = 500
			}
		})
		for i := range 2 {
			b.must(b.SetVringEnable(i, false))
		}
	}
	if b.logs.lines() != 0 {
		t.Errorf("logged %s", b.logs)
	}
	b.checkDevice()
}

// TestPauseKeepsRings: cloud-hypervisor pauses with ENABLE 0 and 1 only.
func TestPauseKeepsRings(t *testing.T) {
	b, addr := acked(t, 2)
	b.must(b.SetVringEnable(0, true))
	b.must(b.SetVringNum(0, 256))
	b.must(b.SetVringAddr(addr(0)))
	b.must(b.SetVringKick(0, eventFD(t)))
	b.must(b.SetVringEnable(0, false))
	b.must(b.SetVringAddr(addr(0)))
	b.must(b.SetVringNum(0, 256))
	b.must(b.SetVringEnable(0, true))
	b.dev.peek(func(d *fakeDevice) {
		if len(d.starts) != 1 || len(d.running) != 1 || !d.enabled[0] {
			t.Errorf("starts %v, running %v, enabled %v", d.starts, d.running, d.enabled)
		}
	})
}
