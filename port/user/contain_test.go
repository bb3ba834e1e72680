package user

import (
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

const injected = "injected defect"

// faulty panics wherever it is asked.
type faulty struct{ armed chan struct{} }

func (faulty) Check(netip.Addr, netip.AddrPort) (bool, string)                   { panic(injected) }
func (faulty) Answer6([]byte, netip.Addr, [6]byte) []byte                        { panic(injected) }
func (faulty) Answer4([]byte, [6]byte, netip.Addr) ([]byte, netip.Addr, [6]byte) { panic(injected) }
func (faulty) ready(uint32)                                                      { panic(injected) }
func (f faulty) ServeDNS(conn net.PacketConn, l net.Listener) {
	if l != nil {
		<-f.armed
		panic(injected)
	}
	_, _, _ = conn.ReadFrom(make([]byte, 1)) // until the network closes it
}

// TestPanicEndsOneNetwork: a defect that shows anywhere but on a processor of the stack ends its network, which closes what it held, and
// nothing else.
func TestPanicEndsOneNetwork(t *testing.T) {
	other := newGuest(t, newPort(t, Options{}))
	at := listenTCP(t, live4+":0", echoTCP)
	for _, tc := range []struct {
		where string
		hooks Hooks
		show  func(t *testing.T, p *Port, g *guest)
	}{
		{"worker", Hooks{Policy: faulty{}}, func(_ *testing.T, _ *Port, g *guest) {
			g.card.send(g.segment(1000, netip.MustParseAddrPort(at), 1, flagSYN), virtio.NetHdr{})
		}},
		{"worker, datagram in one piece", Hooks{Policy: faulty{}}, func(_ *testing.T, _ *Port, g *guest) {
			_, _ = g.dialUDP(at).Write([]byte("x"))
		}},
		{"worker, datagram in pieces", Hooks{Policy: faulty{}}, func(_ *testing.T, _ *Port, g *guest) {
			_, _ = g.dialUDP(at).Write(make([]byte, 4000))
		}},
		{"goroutine of the forwarder", Hooks{}, func(_ *testing.T, p *Port, g *guest) {
			p.flows.fds.budget = nil
			g.card.send(g.segment(1000, netip.MustParseAddrPort(at), 1, flagSYN), virtio.NetHdr{})
		}},
		{"called by the stack to send", Hooks{}, func(t *testing.T, p *Port, g *guest) {
			c := g.mustDial(at)
			p.serving.Store(nil)
			_, _ = c.Write([]byte("x"))
		}},
		{"timer of the stack", Hooks{}, func(_ *testing.T, p *Port, _ *guest) {
			p.stack.Clock().AfterFunc(0, func() { panic(injected) })
		}},
		{"poller", Hooks{}, func(t *testing.T, p *Port, _ *guest) {
			fd, err := unix.Eventfd(1, unix.EFD_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Close(fd) })
			if _, err := p.poller.add(fd, unix.EPOLLIN, faulty{}); err != nil {
				t.Fatal(err)
			}
		}},
		{"goroutine of the network", Hooks{}, func(_ *testing.T, p *Port, _ *guest) {
			p.spawn(func() { panic(injected) })
		}},
		{"service", Hooks{DNS: faulty{armed: closed()}}, func(*testing.T, *Port, *guest) {}},
	} {
		t.Run(tc.where, func(t *testing.T) {
			what := Publication{Proto: "tcp", Addr: netip.MustParseAddr(live4), Port: 4321, GuestPort: 1}
			p := newPort(t, Options{Hooks: tc.hooks, Publish: []Publication{what}})
			g := newGuest(t, p)
			tc.show(t, p, g)
			if !porttest.Eventually(func() bool { return !p.Status().Up }) {
				t.Fatal("the network goes on")
			}
			if why := p.Status().Detail; !strings.Contains(why, "defect") || !strings.Contains(why, "add it again") {
				t.Errorf("status: %s", why)
			}
			if !porttest.Eventually(func() bool {
				c, err := net.Dial("tcp", live4+":4321")
				if err == nil {
					c.Close()
				}
				return err != nil
			}) {
				t.Error("the published port still listens")
			}
			c := other.mustDial(at)
			_, _ = c.Write([]byte("hello"))
			_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
			if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
				t.Errorf("another network: %v", err)
			}
			c.Close()
		})
	}
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}
