package vhostuser_test

import (
	"slices"
	"testing"

	"github.com/vhostd/vhostd/virtio"
)

// TestTrap5_QueueNumBothReadings: which rings start under which features. QEMU
// with queues=N reads GET_QUEUE_NUM as pairs and sets up 2N rings; cloud-hypervisor
// reads it as rings, crosvm and libkrun as virtqueues with the control queue.
func TestTrap5_NEG12_QueueNumBothReadings(t *testing.T) {
	const mq, ctrl = virtio.FNetMQ, virtio.FNetCtrlVQ
	all := func(n int) (rings []int) {
		for i := range n {
			rings = append(rings, i)
		}
		return rings
	}
	for _, tt := range []struct {
		name   string
		acked  virtio.Features
		config []int // rings that the front-end configures and kicks
		want   []int
	}{
		{"one pair without MQ", ctrl, all(2), all(2)},
		{"cloud-hypervisor: two pairs in four rings", mq | ctrl, all(4), all(4)},
		{"QEMU queues=4: eight rings", mq, all(8), all(8)},
		{"QEMU queues=5: ten rings", mq, all(10), all(10)},
		{"DPDK order, receive rings first", mq, []int{0, 2, 4, 6, 1, 3, 5, 7}, all(8)},
		{"crosvm: control queue at 2N", mq | ctrl, all(5), all(5)},
		{"crosvm: control queue of a guest without MQ at 2", ctrl, all(3), all(3)},
		{"nothing behind the control queue", mq | ctrl, all(8), all(5)},
		{"nothing behind the control queue without MQ", ctrl, all(8), all(3)},
		{"MQ-05: rings beyond 1 without MQ", 0, all(4), all(2)},
		{"MQ-01: only the last pair", mq, []int{0, 1, 6, 7}, []int{0, 1, 6, 7}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, newDevice(4))
			mem := newMemory(t, 1<<20)
			b.must(b.SetFeatures(bit30 | virtio.FVersion1 | tt.acked))
			b.shareMemory(mem)
			for _, i := range tt.config {
				b.startRing(mem, i, 0)
				b.must(b.SetVringEnable(i, true))
			}
			b.must(b.Sync())
			b.dev.peek(func(d *fakeDevice) {
				for i, c := range d.running {
					if c.Control != (tt.acked.Has(ctrl) && (i == 4 || i == 2 && !tt.acked.Has(mq))) {
						t.Errorf("ring %d: control %v", i, c.Control)
					}
				}
				got := slices.Sorted(slices.Values(d.starts))
				if !slices.Equal(got, tt.want) {
					t.Errorf("started %v, want %v", got, tt.want)
				}
			})
			for _, i := range tt.config {
				if _, err := b.GetVringBase(i); err != nil {
					t.Errorf("GET_VRING_BASE of ring %d: %v", i, err)
				}
			}
			b.checkDevice()
			if b.logs.lines() != 0 {
				t.Errorf("logged %s", b.logs)
			}
		})
	}
}

// TestMQ07_A9_HighestRings: 128 pairs use every index that the protocol has.
func TestMQ07_A9_HighestRings(t *testing.T) {
	b := newBench(t, newDevice(256)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 16<<20)
	b.shareMemory(mem)
	for i := range 256 {
		b.startRing(mem, i, uint32(i))
	}
	b.dev.peek(func(d *fakeDevice) {
		if len(d.running) != 256 || d.running[255].Base != 255 {
			t.Errorf("%d rings run", len(d.running))
		}
	})
	if err := b.SetVringNum(256, 256); !isRefused(err) {
		t.Errorf("ring 256: %v", err)
	}
	for i := range 256 {
		if v, err := b.GetVringBase(i); err != nil || v != uint32(i) {
			t.Fatalf("ring %d: position %d, %v", i, v, err)
		}
	}
	b.checkDevice()
}
