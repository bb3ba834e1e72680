package vhostuser_test

import (
	"testing"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtqueue"
)

// GET_VRING_BASE_SKIP_DRAIN is offered on request, together with the bit for what is inflight, answers like GET_VRING_BASE, and
// leaves the inflight region as it is.
func TestSkipDrain(t *testing.T) {
	const bits = vhostuser.ProtoBaseInflight | vhostuser.ProtoSkipDrain
	plain := newBench(t, newDevice(2))
	p, err := plain.GetProtocolFeatures()
	plain.must(err)
	if p&bits != 0 {
		t.Errorf("%v is offered unasked", p&bits)
	}
	b := newBench(t, newDevice(2), func(o *vhostuser.Options) { o.Protocol = bits }).negotiate()
	mem := newMemory(t, 8<<20)
	b.shareMemory(mem)
	in := b.inflightOf(t, 2, 256)
	b.must(b.SetInflightFD(in))
	b.startRing(mem, 0, 7)
	b.must(b.Sync())
	var part *virtqueue.Inflight
	b.dev.peek(func(d *fakeDevice) {
		d.positions[0] = 9
		part = d.running[0].Inflight
	})
	reply, err := b.Call(vhostuser.ReqGetVringBaseSkipDrain, vhostuser.VringState{Index: 0}.Append(nil))
	b.must(err)
	if v := vhostuser.DecodeVringState(reply); v.Index != 0 || v.Num != 9 {
		t.Errorf("answer %+v", v)
	}
	if part == nil || b.dev.isRunning(0) {
		t.Errorf("the ring was not tracked (%v) or runs on", part)
	}
	b.checkDevice()

	// Without a region there is nothing that could name what is inflight; the answer that it needs cannot be given.
	b = newBench(t, newDevice(2), func(o *vhostuser.Options) { o.Protocol = bits }).negotiate()
	if _, err := b.Call(vhostuser.ReqGetVringBaseSkipDrain, vhostuser.VringState{Index: 0}.Append(nil)); err == nil {
		t.Error("answered without an inflight region")
	}
	_ = b.wait()
}
