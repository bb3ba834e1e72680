package user

import (
	"fmt"
	"io"
	"net"
	"testing"
)

// BenchmarkTCP moves bytes between a guest's stack and a socket of the host. The time contains the guest's work; bytes/s of one core's time
// are in docs/performance.md.
func BenchmarkTCP(b *testing.B) {
	for _, way := range []string{"up", "down"} {
		for _, mtu := range []int{1500, 65520} {
			b.Run(fmt.Sprintf("way=%s/mtu=%d", way, mtu), func(b *testing.B) {
				p := newPort(b, Options{MTU: mtu})
				g := newGuest(b, p)
				const block = 1 << 20
				done := make(chan struct{})
				at := listenTCP(b, live4+":0", func(c *net.TCPConn) {
					defer close(done)
					if way == "up" {
						_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 256<<10))
						return
					}
					buf := make([]byte, 256<<10)
					for i := 0; i < b.N*block; i += len(buf) {
						if _, err := c.Write(buf); err != nil {
							return
						}
					}
				})
				c := g.mustDial(at)
				b.SetBytes(block)
				b.ResetTimer()
				if way == "up" {
					buf := make([]byte, block)
					for range b.N {
						if _, err := c.Write(buf); err != nil {
							b.Fatal(err)
						}
					}
					_ = c.CloseWrite()
				} else if n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 256<<10)); n != int64(b.N)*block {
					b.Fatal(n, err)
				}
				<-done
				b.ReportMetric(float64(p.stack.Stats().TCP.Retransmits.Value()+g.stack.Stats().TCP.Retransmits.Value()), "retransmits")
			})
		}
	}
}

// BenchmarkUDP sends datagrams of a guest into the host, frame by frame as the worker does.
func BenchmarkUDP(b *testing.B) {
	for _, size := range []int{64, 1400} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			p := newPort(b, Options{})
			g := newGuest(b, p)
			c, err := net.ListenPacket("udp", live4+":0")
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			u := g.dialUDP(c.LocalAddr().String())
			buf := make([]byte, size)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := u.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
