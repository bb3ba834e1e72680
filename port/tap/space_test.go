package tap

import (
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/port/porttest"
)

// space is a network namespace without any traffic of its own. It disappears with the test.
type space struct {
	*netlink.Handle
	ns netns.NsHandle
}

func newSpace(t testing.TB) *space {
	t.Helper()
	testmain.NeedTun(t)
	s := &space{}
	var err error
	runtime.LockOSThread()
	home, err := netns.Get()
	if err == nil {
		s.ns, err = netns.New()
		if back := netns.Set(home); back != nil {
			t.Fatal(back) // the thread stays locked and ends with this goroutine
		}
		home.Close()
	}
	runtime.UnlockOSThread()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.ns.Close() })
	if s.Handle, err = netlink.NewHandleAt(s.ns, unix.NETLINK_ROUTE); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Handle.Close)
	s.do(t, func() error {
		err := os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	})
	return s
}

// do runs f on a thread in the namespace.
func (s *space) do(t testing.TB, f func() error) {
	t.Helper()
	if err := s.try(f); err != nil {
		t.Fatal(err)
	}
}

func (s *space) try(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends here
		if err := netns.Set(s.ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// tap makes a port in the namespace and closes it when the test ends.
func (s *space) tap(t testing.TB, opts Options) *Port {
	t.Helper()
	p, err := s.newTap(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (s *space) newTap(opts Options) (p *Port, err error) {
	err = s.try(func() (err error) {
		p, err = New(opts)
		return err
	})
	return p, err
}

func (s *space) find(t testing.TB, name string) netlink.Link {
	t.Helper()
	link, err := s.LinkByName(name)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return link
}

func (s *space) exists(name string) bool {
	_, err := s.LinkByName(name)
	return err == nil
}

// must fails the test if a command did.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// host is the kernel's end of a tap: what it sends the port receives, and the reverse.
type host struct {
	fd     int
	header bool // a virtio header of 10 bytes precedes each frame
}

func (s *space) host(t testing.TB, name string, header bool) *host {
	t.Helper()
	h := &host{header: header}
	index := s.find(t, name).Attrs().Index
	all := int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL)))
	s.do(t, func() (err error) {
		if h.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		if header {
			if err := unix.SetsockoptInt(h.fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
				return err
			}
		}
		return unix.Bind(h.fd, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: index})
	})
	t.Cleanup(func() { unix.Close(h.fd) })
	return h
}

func (h *host) send(t testing.TB, frame []byte) {
	t.Helper()
	var err error
	if !porttest.Eventually(func() bool {
		_, err = unix.Write(h.fd, frame)
		return !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EAGAIN)
	}) || err != nil {
		t.Fatalf("host sends %d bytes: %v", len(frame), err)
	}
}

// recv is the next frame that the port sent, nil if none comes within a moment.
func (h *host) recv(t testing.TB) []byte {
	t.Helper()
	buf := make([]byte, 1<<17)
	deadline := time.Now().Add(200 * time.Millisecond)
	for time.Now().Before(deadline) {
		n, from, err := unix.Recvfrom(h.fd, buf, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENETDOWN) { // the latter once for each time it went down
			time.Sleep(time.Millisecond)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING {
			return buf[:n]
		}
	}
	return nil
}

// udpFrame is a small UDP datagram of the flow with this number.
func udpFrame(flow int) []byte {
	b := make([]byte, 60)
	copy(b, []byte{0x02, 0, 0, 0, 0, 0x0a, 0x02, 0, 0, 0, 0, 0x0b, 0x08, 0x00})
	copy(b[14:], []byte{0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2})
	binary.BigEndian.PutUint16(b[34:], uint16(1024+flow))
	binary.BigEndian.PutUint16(b[36:], 9)
	binary.BigEndian.PutUint16(b[38:], 26)
	return b
}

// threads is how many threads the process has.
func threads(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
