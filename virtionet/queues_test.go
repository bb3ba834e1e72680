package virtionet

import (
	"testing"

	"github.com/vhostd/vhostd/port/null"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

// TestLastPairAlone is MQ-01 and MQ-07: the last pair works although no other was set up,
// up to the largest number, and beyond the number offered as far as rings are accepted.
func TestLastPairAlone(t *testing.T) {
	for _, test := range []struct{ pairs, pair int }{{4, 2}, {4, 3}, {4, 7}, {128, 127}} {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: baseFeatures | virtio.FNetMQ, pairs: test.pairs, pair: test.pair})
		b := r.offer(1600)
		p.feed(plain(60, 1))
		head := r.send(plain(61, 2))
		r.run()
		r.wantReceived([]rxBuffer{b}, plain(60, 1))
		wantSent(t, p, plain(61, 2))
		r.wantUsed(1, head)
		if n := len(r.dev.Snapshot().Rings); n != 2 {
			t.Errorf("%d rings are shown, want 2", n)
		}
		r.finishEarly()
	}
}

// TestOneSideOnly runs a pair of which only one ring was started.
func TestOneSideOnly(t *testing.T) {
	for i := range 2 {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: baseFeatures})
		r.stop(1 - i)
		p.feed(plain(60, 1))
		if i == 0 {
			b := r.offer(1600)
			r.run()
			r.wantReceived([]rxBuffer{b}, plain(60, 1))
		} else {
			head := r.send(plain(61, 2))
			r.run()
			r.wantUsed(1, head)
		}
		r.finishEarly()
	}
}

func TestOptions(t *testing.T) {
	loop := must(worker.New(worker.Options{Name: "w", CPU: -1}))
	defer loop.Close()
	good := func() Options {
		return Options{Port: null.New(), Workers: []*worker.Loop{loop}, QueuePairs: 1}
	}
	for name, change := range map[string]func(*Options){
		"no pairs":       func(o *Options) { o.QueuePairs = 0 },
		"too many pairs": func(o *Options) { o.QueuePairs = MaxQueuePairs + 1 },
		"negative lag":   func(o *Options) { o.TxLag = -1 },
		"huge lag":       func(o *Options) { o.TxLag = maxLag + 1 },
		"no worker":      func(o *Options) { o.Workers = nil },
	} {
		o := good()
		change(&o)
		if _, err := New(o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	o := good()
	o.QueuePairs, o.MAC, o.MTU = 4, []byte{2, 0, 0, 0, 0, 9}, 1500
	d := must(New(o))
	defer d.Close()
	if !d.Features().Has(virtio.FNetMQ | virtio.FNetMAC | virtio.FNetMTU | virtio.FVersion1 | virtio.FNetMrgRxBuf) {
		t.Errorf("features are %v", d.Features())
	}
	c := d.Config()
	if len(c) != 24 || c[5] != 9 || c[8] != 4 || c[10] != 1500&0xff {
		t.Errorf("configuration space is %x", c)
	}
	if _, err := d.StopRing(3); err == nil {
		t.Error("a ring that was never started was stopped")
	}
}

func TestCopyPolicy(t *testing.T) {
	for _, c := range []CopyPolicy{CopyNever, CopyAuto, CopyAlways} {
		if got, err := ParseCopyPolicy(c.String()); got != c || err != nil {
			t.Errorf("%v is parsed as %v: %v", c, got, err)
		}
	}
	if _, err := ParseCopyPolicy("sometimes"); err == nil {
		t.Error("sometimes was accepted")
	}
}
