package echo

import (
	"bytes"
	"os"
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/internal/waiting"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines()))
}

func newPort(t testing.TB, opts Options) *Port {
	t.Helper()
	p, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestConformance(t *testing.T) {
	t.Run("swap", func(t *testing.T) {
		porttest.Run(t, porttest.Config{
			New:     func(t testing.TB) port.Port { return newPort(t, Options{Swap: true}) },
			Returns: porttest.Swapped,
		})
	})
	t.Run("plain", func(t *testing.T) {
		porttest.Run(t, porttest.Config{
			New:     func(t testing.TB) port.Port { return newPort(t, Options{Backlog: 100}) },
			Returns: bytes.Clone,
		})
	})
}

func TestValidate(t *testing.T) {
	for backlog, good := range map[int]bool{-1: false, 0: true, 1: true, MaxBacklog: true, MaxBacklog + 1: false} {
		if err := (Options{Backlog: backlog}).Validate(); (err == nil) != good {
			t.Errorf("backlog %d: %v", backlog, err)
		}
	}
}

func TestKeepsOffloadMarks(t *testing.T) {
	rig := porttest.NewRig(t)
	q := rig.Open(t, newPort(t, Options{Swap: true}), 0)
	hdr := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv4, HdrLen: 54, GSOSize: 1448, CsumStart: 34, CsumOffset: 16}
	pkts := []packet.Packet{rig.Packet(t, porttest.Frame(30000, 0), 0)}
	pkts[0].Hdr = hdr
	q.Send(pkts)
	var got [1]packet.Packet
	if q.Recv(got[:]) != 1 || got[0].Hdr != hdr {
		t.Errorf("marks came back as %+v, want %+v", got[0].Hdr, hdr)
	}
	rig.Release(got[:])
}

// TestFIFO compares the queue with a slice.
func TestFIFO(t *testing.T) {
	rig := porttest.NewRig(t)
	rapid.Check(t, func(rt *rapid.T) {
		backlog := rapid.IntRange(1, 9).Draw(rt, "backlog")
		q, err := newPort(t, Options{Backlog: backlog}).OpenQueue(0, rig.Resources())
		if err != nil {
			rt.Fatal(err)
		}
		defer q.Close()
		var model [][]byte
		seed := byte(0)
		rt.Repeat(map[string]func(*rapid.T){
			"send": func(rt *rapid.T) {
				pkts := make([]packet.Packet, rapid.IntRange(0, 6).Draw(rt, "n"))
				want := min(len(pkts), backlog-len(model))
				for i := range pkts {
					seed++
					frame := porttest.Frame(20, seed)
					pkts[i] = rig.Packet(t, frame, 0)
					if i < want {
						model = append(model, frame)
					}
				}
				n := q.Send(pkts)
				rig.Release(pkts[n:])
				if n != want {
					rt.Fatalf("Send = %d, want %d", n, want)
				}
			},
			"recv": func(rt *rapid.T) {
				pkts := make([]packet.Packet, rapid.IntRange(0, 6).Draw(rt, "n"))
				n := q.Recv(pkts)
				if want := min(len(pkts), len(model)); n != want {
					rt.Fatalf("Recv = %d, want %d", n, want)
				}
				for i := range pkts[:n] {
					if !bytes.Equal(porttest.Bytes(&pkts[i]), model[i]) {
						rt.Fatal("frames out of order")
					}
				}
				model = model[n:]
				rig.Release(pkts[:n])
			},
			"": func(rt *rapid.T) {
				if q.Arm() != (len(model) > 0) {
					rt.Fatalf("Arm = %v with %d frames", q.Arm(), len(model))
				}
			},
		})
	})
}

func BenchmarkSendRecv(b *testing.B) {
	rig := porttest.NewRig(b)
	p, err := New(Options{Swap: true})
	if err != nil {
		b.Fatal(err)
	}
	q := rig.Open(b, p, 0)
	var pkts [port.MaxBatch]packet.Packet
	for i := range pkts {
		pkts[i] = rig.Packet(b, porttest.Frame(64, 0), 0)
	}
	for b.Loop() {
		q.Send(pkts[:])
		q.Recv(pkts[:])
	}
	rig.Release(pkts[:])
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/port.MaxBatch, "ns/frame")
}

// TestBudget: queues that nobody empties hold no more together than a full backlog of the largest frames would.
func TestBudget(t *testing.T) {
	const backlog = 20
	rig := porttest.NewRig(t)
	p := newPort(t, Options{Backlog: backlog})
	queues := []port.Queue{rig.Open(t, p, 0), rig.Open(t, p, 1), rig.Open(t, p, 2)}
	fill := func(q port.Queue, size int) (n int) {
		for {
			pkts := []packet.Packet{rig.Packet(t, porttest.Frame(size, 0), 0)}
			if q.Send(pkts) == 0 {
				rig.Release(pkts)
				return n
			}
			n++
		}
	}
	for i, want := range []int{backlog, 1, 1} {
		if n := fill(queues[i], virtio.MaxFrame); n != want {
			t.Errorf("queue %d took %d of the largest frames, want %d", i, n, want)
		}
	}
	var got [backlog]packet.Packet
	if n := queues[0].Recv(got[:]); n != backlog {
		t.Fatalf("%d frames came back", n)
	}
	rig.Release(got[:])
	for i, want := range []int{backlog, backlog - 1, 15} {
		if n := fill(queues[i], 60); n != want {
			t.Errorf("queue %d took %d small frames, want %d", i, n, want)
		}
	}
	for _, q := range queues {
		if err := q.Close(); err != nil {
			t.Error(err)
		}
	}
	if held := p.account.Held(); held != 0 {
		t.Errorf("closed queues hold %d", held)
	}
}

// TestSharedBudget: networks that share a budget hold no more than their share of the arena together, whatever their backlogs. Who takes all
// that he can get leaves as much, and there is room for one that wants little.
func TestSharedBudget(t *testing.T) {
	rig, budget := porttest.NewRig(t), &Budget{}
	fill := func(p *Port) (n int) {
		q := rig.Open(t, p, 0)
		for {
			pkts := []packet.Packet{rig.Packet(t, porttest.Frame(4000, 0), 0)}
			if q.Send(pkts) == 0 {
				rig.Release(pkts)
				return n
			}
			n++
		}
	}
	limit := int64(rig.Arena.Bytes() / budgetShare)
	for i := range 6 {
		p := newPort(t, Options{Backlog: 4096, Budget: budget})
		n := fill(p)
		held := p.account.Held()
		if n < 1 || budget.Held() > limit {
			t.Errorf("network %d holds %d frames, all together %d bytes of %d", i, n, budget.Held(), limit)
		}
		const one = 4000 + waiting.FrameCost
		if free := limit - budget.Held() + held; held < free/2-one || held > free/2+one {
			t.Errorf("network %d holds %d bytes of the %d that were free", i, held, free)
		}
	}
}
