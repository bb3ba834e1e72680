package policy

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

func TestCheckAllocatesNothing(t *testing.T) {
	w := newWorld(t, "deny=10.0.0.0/8", "allow=*.example", "allow=192.0.2.0/24")
	w.guest.Answer("a.example", nil, netip.MustParseAddr("198.51.100.1"), time.Hour)
	for _, text := range []string{"192.0.2.1:80", "198.51.100.1:443"} {
		dst := netip.MustParseAddrPort(text)
		if n := testing.AllocsPerRun(100, func() { w.guest.Check(dst) }); n != 0 {
			t.Errorf("%s: %v allocations", text, n)
		}
	}
}

// BenchmarkCheck judges a flow that the last rule allows.
func BenchmarkCheck(b *testing.B) {
	for _, n := range []int{0, 1, 16, 256} {
		for _, kind := range []string{"addr", "name"} {
			b.Run(fmt.Sprintf("rules=%d/last=%s", n, kind), func(b *testing.B) {
				var lines []string
				for i := range max(n-1, 0) {
					lines = append(lines, fmt.Sprintf("deny=10.%d.%d.0/24", i/256, i%256))
				}
				if n > 0 && kind == "addr" {
					lines = append(lines, "allow=192.0.2.0/24")
				} else if n > 0 {
					lines = append(lines, "allow=*.example")
				}
				w := newWorld(b, lines...)
				w.guest.Answer("a.example", nil, netip.MustParseAddr("192.0.2.1"), 10000*time.Hour)
				dst := netip.MustParseAddrPort("192.0.2.1:443")
				b.ReportAllocs()
				for b.Loop() {
					if !w.guest.Check(dst).Allowed {
						b.Fatal("refused")
					}
				}
			})
		}
	}
}
