package virtqueue_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// BenchmarkPackedBatch serves full rings of one-buffer chains in batches of 32.
// device-ns/chain is the best time of one ring for the device's turns alone,
// driver-ns/chain that of the driver's half.
func BenchmarkPackedBatch(b *testing.B) {
	for _, size := range []int{256, 1024} {
		for _, inOrder := range []virtio.Features{0, virtio.FInOrder} {
			b.Run(fmt.Sprintf("ring=%d/inorder=%v", size, inOrder != 0), func(b *testing.B) {
				benchPacked(b, newPackedRig(b, rigOptions{size: size, features: inOrder}))
			})
		}
	}
}

func benchPacked(b *testing.B, r *packedRig) {
	size := int(r.cfg.Size)
	device, drv := time.Hour, time.Hour
	b.ReportAllocs()
	for b.Loop() {
		start := time.Now()
		for i := range size {
			if _, err := r.drv.AddDirect(driver.Buf{Addr: bufGPA + uint64(i)*64, Len: 64}); err != nil {
				b.Fatal(err)
			}
		}
		r.drv.Publish()
		added := time.Now()
		for range size / virtqueue.MaxBatch {
			r.b.Reset()
			if got, err := r.dev.Fill(r.b, virtqueue.MaxBatch); got != virtqueue.MaxBatch || err != nil {
				b.Fatal(got, err)
			}
			r.dev.CompleteBatch(r.b, 0, virtqueue.MaxBatch)
			r.dev.Publish(0)
		}
		served := time.Now()
		for range size {
			if _, _, ok := r.drv.GetUsed(); !ok {
				b.Fatal(r.drv.Err())
			}
		}
		drv = min(drv, time.Since(served)+added.Sub(start))
		device = min(device, served.Sub(added))
	}
	b.ReportMetric(float64(device.Nanoseconds())/float64(size), "device-ns/chain")
	b.ReportMetric(float64(drv.Nanoseconds())/float64(size), "driver-ns/chain")
}
