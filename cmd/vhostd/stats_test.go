package main

import (
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/daemon"
)

func TestPrintStats(t *testing.T) {
	var out strings.Builder
	err := printStats(&out, daemon.Stats{Guests: []daemon.GuestStats{
		{Name: "idle", TxAlloc: "frag", Copy: daemon.CopyStats{Policy: "auto"}},
		{Name: "busy", TxAlloc: "fragpool", Copy: daemon.CopyStats{Policy: "always", Cached: 2048, PastCache: 1 << 20, Fences: 9},
			Pool: daemon.PoolStats{InFlight: 128, Fast: 1000, Refill: 3, Borrowed: 4, Slow: 2}, Rings: []daemon.RingStats{
				{Index: 2, Packets: 1000000, Bytes: 1500000000, Kicks: 1, Calls: 22, Batches: 333},
				{Index: 3, Drops: map[string]uint64{"too_short": 2, "no_memory": 1, "never": 0}},
			}},
	}})
	const want = `GUEST  PAIR  QUEUE      PACKETS  BYTES    KICKS  CALLS  BATCHES  DROPPED PACKETS
idle   -     -          0        0 B      0      0      0        0
busy   1     receiveq   1000000  1.4 GiB  1      22     333      0
busy   1     transmitq  0        0 B      0      0      0        3 (no_memory 1, too_short 2)

GUEST  TX-ALLOC  COPY    CACHED   PAST THE CACHE  FENCES  POOL PAGES  FAST  REFILLED  FRESH
idle   frag      auto    0 B      0 B             0       0           0     0         0
busy   fragpool  always  2.0 KiB  1.0 MiB         9       128         1000  7         2
`
	if err != nil || out.String() != want {
		t.Errorf("%v\n%s\nwant\n%s", err, out.String(), want)
	}
}

func TestByteSize(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1 << 20: "1.0 MiB", 3 << 39: "1.5 TiB", 1<<64 - 1: "16.0 EiB"} {
		if got := byteSize(n); got != want {
			t.Errorf("byteSize(%d) = %q, want %q", n, got, want)
		}
	}
}
