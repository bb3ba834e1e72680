package virtqueue_test

import (
	"testing"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// TestBothWays: chains of readable and then writable buffers, as a control queue has
// them, in both formats, as chains and in tables. Each comes back with its own length,
// also with IN_ORDER.
func TestBothWays(t *testing.T) {
	const size, features = 64, virtio.FRingIndirectDesc | virtio.FInOrder
	s := newRig(t, rigOptions{size: size, features: features})
	s.cfg.BothWays = true
	s.restart(t, 0)
	p := newPackedRig(t, rigOptions{size: size, features: features})
	p.cfg.BothWays = true
	p.restart(t, fresh|fresh<<16)
	for _, format := range []struct {
		name string
		mem  uintptr // of a table
		drv  driver.Queue
		dev  virtqueue.Ring
	}{
		{"split", host(t, s.mem, tableGPA, 4096), s.drv, s.dev},
		{"packed", host(t, p.mem, tableGPA, 4096), p.drv, p.dev},
	} {
		for _, tt := range []struct {
			name     string
			bufs     []driver.Buf
			readable uint16
			n        uint16
			fault    virtqueue.Fault
		}{
			{"header and answer", []driver.Buf{{Addr: bufGPA, Len: 3}, {Addr: bufGPA + 64, Len: 1, Write: true}}, 1, 2, 0},
			{"three and two", []driver.Buf{{Addr: bufGPA, Len: 2}, {Addr: bufGPA, Len: 6}, {Addr: bufGPA, Len: 1},
				{Addr: bufGPA, Len: 1, Write: true}, {Addr: bufGPA, Len: 9, Write: true}}, 3, 5, 0},
			{"readable alone", []driver.Buf{{Addr: bufGPA, Len: 3}}, 1, 1, 0},
			{"writable alone", []driver.Buf{{Addr: bufGPA, Len: 3, Write: true}}, 0, 1, 0},
			{"no bytes to read", []driver.Buf{{Addr: 1, Len: 0}, {Addr: bufGPA, Len: 3, Write: true}}, 0, 1, 0},
			{"no bytes to write", []driver.Buf{{Addr: bufGPA, Len: 3}, {Addr: 1, Len: 0, Write: true}}, 1, 1, 0},
			{"readable behind writable", []driver.Buf{{Addr: bufGPA, Len: 3}, {Addr: bufGPA, Len: 1, Write: true}, {Addr: bufGPA, Len: 1}}, 0, 0, virtqueue.FaultDirection},
			{"readable behind no bytes to write", []driver.Buf{{Addr: bufGPA, Len: 3}, {Addr: bufGPA, Len: 0, Write: true}, {Addr: bufGPA, Len: 1}}, 0, 0, virtqueue.FaultDirection},
			{"unmapped", []driver.Buf{{Addr: bufGPA, Len: 3}, {Addr: 0x10000000, Len: 1, Write: true}}, 0, 0, virtqueue.FaultAddress},
		} {
			for _, table := range []bool{false, true} {
				var head uint16
				var err error
				if table {
					head, err = format.drv.AddIndirect(format.mem, tableGPA, tt.bufs)
				} else {
					head, err = format.drv.AddChain(tt.bufs)
				}
				if err != nil {
					t.Fatal(err)
				}
				format.drv.Publish()
				b := new(virtqueue.Batch)
				if n, err := format.dev.Fill(b, 1); n != 1 || err != nil {
					t.Fatalf("%s, %s: %d chains, %v", format.name, tt.name, n, err)
				}
				c := b.Chains[0]
				if c.Fault != tt.fault || c.N != tt.n || c.Fault == 0 && c.Readable != tt.readable {
					t.Errorf("%s, %s, table %v: fault %v, %d segments, %d readable", format.name, tt.name, table, c.Fault, c.N, c.Readable)
				}
				format.dev.Complete(c.Head, 1)
				format.dev.Publish(0)
				if got, n, ok := format.drv.GetUsed(); !ok || got != head || n != 1 {
					t.Errorf("%s, %s: used %d with length %d, %v, want %d with 1", format.name, tt.name, got, n, ok, head)
				}
			}
		}
	}
}
