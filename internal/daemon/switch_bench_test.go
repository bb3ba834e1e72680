package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

// BenchmarkSwitch sends frames from one guest to another through the sockets and rings of both. Both front-ends run on one goroutine,
// which bounds the rate; cpu-ns/op is the processor time of the worker that serves both guests.
func BenchmarkSwitch(b *testing.B) {
	for _, size := range []int{64, 1500} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			d, w := benchDaemon(b)
			from, to := benchGuest(b, d, 1), benchGuest(b, d, 2)
			before := cpuOf(w)
			b.ResetTimer()
			move(b, from, to, size)
			b.StopTimer()
			b.ReportMetric(float64(cpuOf(w)-before)/float64(b.N), "cpu-ns/op")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pps")
		})
	}
}

func benchDaemon(b *testing.B) (*Daemon, *worker.Loop) {
	log := slog.New(slog.DiscardHandler)
	arena, err := pagemem.NewArena(pagemem.Config{Bytes: 64 << 20, Name: "bench"})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { arena.Close() })
	w, err := worker.New(worker.Options{Name: "worker0", CPU: -1, Wake: worker.Block, Logger: log})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { w.Close() })
	d := New(Options{Arena: arena, Workers: []*worker.Loop{w}, Logger: log})
	b.Cleanup(func() { _ = d.Close(context.Background()) })
	return d, w
}

// benchGuest adds guest n to the switch and connects it.
func benchGuest(b *testing.B, d *Daemon, n int) *frontend.Pair {
	g := config.DefaultGuest()
	g.Name, g.Socket, g.Network = fmt.Sprint("vm", n), filepath.Join(b.TempDir(), "vm"), fmt.Sprintf("switch,name=lan,mac=02:00:00:00:00:0%d", n)
	spec, err := g.Parse()
	if err != nil {
		b.Fatal(err)
	}
	if err := d.Add(spec, Source{}); err != nil {
		b.Fatal(err)
	}
	mem, err := frontend.NewMemory(8 << 20)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { mem.Close() })
	c, err := frontend.Connect(g.Socket, mem, frontend.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	pair, err := c.StartPair(0)
	if err == nil {
		err = c.Sync()
	}
	if err != nil {
		b.Fatal(err)
	}
	return pair
}

// move sends b.N frames, at most a window ahead of what has arrived.
func move(b *testing.B, from, to *frontend.Pair, size int) {
	const window = 192
	frame := make([]byte, size)
	copy(frame, []byte{2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xb5})
	var buf []byte
	deadline := time.Now().Add(time.Minute)
	for sent, received := 0, 0; received < b.N; {
		if _, err := to.PostRx(256); err != nil {
			b.Fatal(err)
		}
		for ; sent < b.N && sent-received < window; sent++ {
			if err := from.Stage(virtio.NetHdr{}, frame, frontend.Direct); err != nil {
				break
			}
		}
		if err := from.TX.Flush(); err != nil {
			b.Fatal(err)
		}
		for {
			_, got, ok, err := to.AppendRecv(buf[:0])
			if err != nil || ok && len(got) != size {
				b.Fatalf("%d bytes, %v", len(got), err)
			}
			if !ok {
				break
			}
			buf = got
			received++
		}
		if time.Now().After(deadline) {
			b.Fatalf("%d of %d frames arrived", received, b.N)
		}
	}
}

// cpuOf is the processor time of a worker's thread.
func cpuOf(w *worker.Loop) (d time.Duration) {
	w.Do(func() {
		var u unix.Rusage
		if unix.Getrusage(unix.RUSAGE_THREAD, &u) == nil {
			d = time.Duration(u.Utime.Nano() + u.Stime.Nano())
		}
	})
	return d
}
