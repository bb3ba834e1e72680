package cases

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// host is a network namespace: a machine with a tap of the program's, and perhaps a bridge and another machine behind it.
type host struct {
	t      testing.TB
	ns     *rig.Namespace
	uplink bool // guests reach the tap as the uplink of a switch
}

const tapName = "tap0"

// atTaps runs a test with guests on a tap and with guests on a switch that has a tap as its uplink.
func atTaps(t *testing.T, test func(*testing.T, *host)) {
	t.Helper()
	for name, uplink := range map[string]bool{"tap": false, "uplink": true} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.uplink = uplink
			test(t, h)
		})
	}
}

func newHost(t testing.TB) *host {
	t.Helper()
	testmain.NeedTun(t)
	ns, err := rig.NewNamespace()
	must(t, err)
	t.Cleanup(ns.Close)
	h := &host{t: t, ns: ns}
	h.do(func() error { // no neighbour discovery between the frames of the test
		err := os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	})
	return h
}

func (h *host) do(f func() error) {
	h.t.Helper()
	must(h.t, h.ns.Do(f))
}

// serve starts vhostd with a tap in the namespace.
func (h *host) serve(network string, flags ...string) *vhostd {
	h.t.Helper()
	d := prepare(h.t, network, append([]string{"--queue-pairs", "1"}, flags...)...)
	d.ns = h.ns
	d.start()
	return d
}

// guest serves a guest on tap0, directly or through a switch.
func (h *host) guest(opts frontend.Options, flags ...string) *guest {
	h.t.Helper()
	network := "tap,name=" + tapName
	if h.uplink {
		network = "switch,name=lan,uplink=tap,uplink-name=" + tapName
	}
	g := h.serve(network, flags...).guest(memory(h.t), opts)
	_, err := g.PostRx(g.RX.Ring.Size())
	must(h.t, err)
	return g
}

// link changes an interface.
func (h *host) link(name string, change func(netlink.Link) error) {
	h.t.Helper()
	h.do(func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return change(link)
	})
}

// addTap makes a persistent tap, to attach to.
func (h *host) addTap(name string) {
	h.t.Helper()
	tap := &netlink.Tuntap{
		LinkAttrs: netlink.LinkAttrs{Name: name}, Mode: netlink.TUNTAP_MODE_TAP,
		Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_VNET_HDR,
	}
	h.do(func() error { return netlink.LinkAdd(tap) })
}

// cable is an interface's lower end, as the kernel sees it, with virtio headers.
type cable struct {
	t  testing.TB
	fd int
}

func (h *host) cable(name string) *cable {
	h.t.Helper()
	c := &cable{t: h.t}
	all := int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL)))
	h.link(name, func(link netlink.Link) (err error) {
		if c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(c.fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
			return err
		}
		return unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: link.Attrs().Index})
	})
	h.t.Cleanup(func() { unix.Close(c.fd) })
	return c
}

// try sends a frame to the guest.
func (c *cable) try(hdr virtio.NetHdr, frame []byte) error {
	b := make([]byte, virtio.NetHdrLenLegacy+len(frame))
	hdr.Encode(b[:virtio.NetHdrLenLegacy])
	copy(b[virtio.NetHdrLenLegacy:], frame)
	_, err := unix.Write(c.fd, b)
	return err
}

func (c *cable) send(hdr virtio.NetHdr, frame []byte) {
	c.t.Helper()
	var err error
	eventually(c.t, "the interface takes a frame", func() bool {
		err = c.try(hdr, frame)
		return !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EAGAIN)
	})
	must(c.t, err)
}

// recv waits for the next frame that the guest sent. A VLAN tag is not in it.
func (c *cable) recv() (hdr virtio.NetHdr, frame []byte) {
	c.t.Helper()
	buf := make([]byte, 1<<17)
	eventually(c.t, "the guest's frame arrives at the interface", func() bool {
		n, from, err := unix.Recvfrom(c.fd, buf, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENETDOWN) {
			return false
		}
		must(c.t, err)
		hdr.Decode(buf[:virtio.NetHdrLenLegacy])
		frame = buf[virtio.NetHdrLenLegacy:n]
		return from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING
	})
	return hdr, frame
}

// drain throws away what arrived, so that there is room for more.
func (c *cable) drain() {
	c.t.Helper()
	var b [64]byte // the virtio header needs room
	for {
		switch _, _, err := unix.Recvfrom(c.fd, b[:], unix.MSG_TRUNC); {
		case errors.Is(err, unix.EAGAIN):
			return
		case err != nil && !errors.Is(err, unix.ENETDOWN):
			c.t.Fatal(err)
		}
	}
}

// machine is another machine on the bridge br0, behind a tap without offloads.
type machine struct {
	t    testing.TB
	file *os.File
}

// bridge makes br0 with the machine.
func (h *host) bridge() *machine {
	h.t.Helper()
	m := &machine{t: h.t}
	h.do(func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
		peer := &netlink.Tuntap{
			LinkAttrs: netlink.LinkAttrs{Name: "peer0"}, Mode: netlink.TUNTAP_MODE_TAP,
			Flags: netlink.TUNTAP_NO_PI, NonPersist: true, Queues: 1,
		}
		for _, err := range []error{netlink.LinkAdd(bridge), netlink.LinkAdd(peer)} {
			if err != nil {
				return err
			}
		}
		m.file = peer.Fds[0]
		for _, err := range []error{netlink.LinkSetMaster(peer, bridge), netlink.LinkSetUp(peer), netlink.LinkSetUp(bridge)} {
			if err != nil {
				return err
			}
		}
		return unix.SetNonblock(int(m.file.Fd()), true)
	})
	h.t.Cleanup(func() { m.file.Close() })
	return m
}

// recv waits for the next frame that the guest sent, as it is on the wire.
func (m *machine) recv() []byte {
	m.t.Helper()
	buf := make([]byte, 1<<17)
	var frame []byte
	eventually(m.t, "the guest's frame arrives at the machine on the bridge", func() bool {
		n, err := unix.Read(int(m.file.Fd()), buf)
		if errors.Is(err, unix.EAGAIN) {
			return false
		}
		must(m.t, err)
		frame = buf[:n]
		return n >= 12 && bytes.Equal(frame[6:12], frameOf(14, 0)[6:12])
	})
	return frame
}

// passes demands that an ordinary frame passes in both directions.
func (c *cable) passes(g *guest) {
	c.t.Helper()
	c.drain()
	want := frameOf(60, 0x5a)
	must(c.t, g.SendTx(virtio.NetHdr{}, want, frontend.Direct))
	for {
		if _, got := c.recv(); bytes.Equal(got, want) {
			break
		}
	}
	must(c.t, g.DrainTx(patience))
	begin := time.Now()
	c.send(virtio.NetHdr{}, want)
	for {
		if _, got := g.recv(); bytes.Equal(got, want) {
			break
		}
	}
	soon(c.t, "the frame reached the guest", begin)
}

// join puts an interface into the bridge.
func (h *host) join(name string) {
	h.t.Helper()
	h.link(name, func(link netlink.Link) error {
		bridge, err := netlink.LinkByName("br0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMaster(link, bridge)
	})
}

// handle is a descriptor of the namespace, open until the test ends.
func (h *host) handle() (fd int) {
	h.t.Helper()
	h.do(func() (err error) {
		fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	h.t.Cleanup(func() { unix.Close(fd) })
	return fd
}
