package integration

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

const attachMAC = "52:54:00:77:00:01"

// attachment is a namespace with a running vhostd attach.
type attachment struct {
	*rig.Process
	t  *testing.T
	ns *rig.Namespace
}

// startAttach attaches a namespace of its own and waits until it is ready.
func startAttach(t *testing.T, socket string, flags ...string) *attachment {
	t.Helper()
	ns, err := rig.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ns.Close)
	a := &attachment{t: t, ns: ns}
	a.start(socket, flags...)
	return a
}

func (a *attachment) start(socket string, flags ...string) {
	a.t.Helper()
	binary, err := rig.Binary()
	if err != nil {
		a.t.Fatal(err)
	}
	var path string
	_ = a.ns.Do(func() error {
		path = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		return nil
	})
	a.Process, err = rig.Start(nil, binary, append([]string{"attach", "--socket", socket, "--netns", path}, flags...)...)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(a.Kill)
	a.await()
}

func (a *attachment) await() {
	a.t.Helper()
	err := a.WaitOutput("readiness line", 60*time.Second, func(out string) bool { return strings.Contains("\n"+out, "\nattached eth0 in ") })
	if err != nil {
		a.t.Fatal(err)
	}
}

// stop ends it in order; the interface is gone then.
func (a *attachment) stop() {
	a.t.Helper()
	if err := a.Stop(20 * time.Second); err != nil {
		a.t.Errorf("%v; output:\n%s", err, a.Output())
	}
	if a.ns.HasLink("eth0") {
		a.t.Error("the interface is still there")
	}
}

// link is the interface as the namespace sees it.
func (a *attachment) link() (l netlink.Link) {
	a.t.Helper()
	if err := a.ns.Do(func() (err error) {
		l, err = netlink.LinkByName("eth0")
		return err
	}); err != nil {
		a.t.Fatal(err)
	}
	return l
}

// ping wants all of five requests answered, and waits for the first answer before.
func (a *attachment) ping(dst string, sizes ...int) {
	a.t.Helper()
	var pinger *guest.Pinger
	if err := a.ns.Do(func() (err error) {
		pinger, err = guest.OpenPinger(dst)
		return err
	}); err != nil {
		a.t.Fatal(err)
	}
	defer pinger.Close()
	for end := time.Now().Add(30 * time.Second); ; {
		r, err := pinger.Run(guest.PingArgs{Dst: dst, Size: 56, Count: 1, Timeout: time.Second})
		if err == nil && r.Received == 1 {
			break
		}
		if time.Now().After(end) {
			a.t.Fatalf("no answer of %s (%v); output:\n%s", dst, err, a.Output())
		}
	}
	for _, size := range sizes {
		r, err := pinger.Run(guest.PingArgs{Dst: dst, Size: size, Count: 5, Timeout: 5 * time.Second})
		if err != nil || r.Received != 5 || r.Corrupt != 0 {
			a.t.Errorf("ping of %s with %d bytes: %+v, %v", dst, size, r, err)
		}
	}
}

// streams moves n bytes each way between the namespace, which dials, and a listener, and wants the digests equal.
func (a *attachment) streams(l net.Listener, dial string, n int64) {
	a.t.Helper()
	for _, send := range []bool{true, false} {
		peer := make(chan streamEnd, 1)
		go func() { peer <- acceptStream(l, n, !send) }()
		var conn net.Conn
		if err := a.ns.Do(func() (err error) {
			conn, err = net.DialTimeout("tcp", dial, 20*time.Second)
			return err
		}); err != nil {
			a.t.Fatalf("%v; output:\n%s", err, a.Output())
		}
		_ = conn.SetDeadline(time.Now().Add(slow))
		mine := pumpStream(conn, n, send)
		conn.Close()
		theirs := <-peer
		if mine.err != nil || theirs.err != nil || mine.Bytes != n || theirs.Bytes != n || mine.SHA256 != theirs.SHA256 {
			a.t.Fatalf("%s, sent by the namespace %v: %+v here, %+v there", dial, send, mine, theirs)
		}
		a.t.Logf("%s, sent by the namespace %v: %d MiB, %.0f Mbit/s", dial, send, n/mebibyte, guest.Rate(n, max(mine.Took, theirs.Took)))
	}
}

type streamEnd struct {
	guest.StreamResult
	err error
}

func acceptStream(l net.Listener, n int64, send bool) (e streamEnd) {
	_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(slow))
	conn, err := l.Accept()
	if err != nil {
		return streamEnd{err: err}
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(slow))
	return pumpStream(conn, n, send)
}

// pumpStream sends or receives n bytes. Who sends waits until the other side has read all.
func pumpStream(conn net.Conn, n int64, send bool) (e streamEnd) {
	if !send {
		e.StreamResult, e.err = guest.ReceiveStream(conn)
		return e
	}
	if e.StreamResult, e.err = guest.SendStream(conn, n, uint64(n)); e.err == nil {
		e.err = conn.(*net.TCPConn).CloseWrite()
	}
	if _, err := io.Copy(io.Discard, conn); e.err == nil {
		e.err = err
	}
	return e
}

// TestAttachUser attaches a namespace to the user network: DHCP, pings, TCP over IPv4 and IPv6, and what the device's configuration says.
func TestAttachUser(t *testing.T) {
	testmain.NeedTun(t)
	const network = "user,host-loopback=on,subnet6=fd00:77::/64,gateway6=fd00:77::2,mtu=4000"
	daemon, err := rig.StartDaemon(nil, t.TempDir(), network, "--mac", attachMAC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(daemon.Kill)
	a := startAttach(t, daemon.Socket, "--dhcp", "--json")
	if !strings.Contains(a.Output(), " with 10.0.2.15/24") {
		t.Errorf("output:\n%s", a.Output())
	}
	if l := a.link().Attrs(); l.HardwareAddr.String() != attachMAC || l.MTU != 4000 {
		t.Errorf("the interface has the address %v and the MTU %d", l.HardwareAddr, l.MTU)
	}
	a.ping("10.0.2.2", 56, 3972)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a.streams(l, fmt.Sprintf("10.0.2.2:%d", l.Addr().(*net.TCPAddr).Port), 64*mebibyte)
	l6, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	defer l6.Close()
	a.awaitIPv6("fd00:77:")
	a.streams(l6, fmt.Sprintf("[fd00:77::2]:%d", l6.Addr().(*net.TCPAddr).Port), 8*mebibyte)
	a.stop()
	if out := a.Output(); !strings.Contains(out, `"connections":1`) || !strings.Contains(out, `"dropped":{}`) {
		t.Errorf("output:\n%s", out)
	}
	if err := daemon.Stop(); err != nil {
		t.Error(err)
	}
}

// awaitIPv6 waits until the kernel has made an address of a router's prefix and found that nobody else has it.
func (a *attachment) awaitIPv6(prefix string) {
	a.t.Helper()
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		var list []netlink.Addr
		if err := a.ns.Do(func() error {
			l, err := netlink.LinkByName("eth0")
			if err == nil {
				list, err = netlink.AddrList(l, netlink.FAMILY_V6)
			}
			return err
		}); err != nil {
			a.t.Fatal(err)
		}
		for _, address := range list {
			if strings.HasPrefix(address.IP.String(), prefix) && address.Flags&unix.IFA_F_TENTATIVE == 0 {
				return
			}
		}
		if time.Now().After(end) {
			a.t.Fatalf("no address of %s: %v", prefix, list)
		}
	}
}

// TestAttachTap attaches a namespace to a tap in another one, under features that change how frames cross.
func TestAttachTap(t *testing.T) {
	e := newEnv(t, 9000)
	l, err := e.ns.Listen(hostIP + ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, flags := range map[string][]string{
		"default":             {"--mtu", "9000"},
		"two pairs":           {"--mtu", "9000", "--queue-pairs", "2"},
		"packed, poll":        {"--mtu", "9000", "--ring", "packed", "--wake", "poll"},
		"block":               {"--mtu", "9000", "--wake", "block", "--without", "EVENT_IDX"},
		"no merging":          {"--mtu", "9000", "--without", "MRG_RXBUF"},
		"no protocol":         {"--mtu", "9000", "--without", "PROTOCOL_FEATURES"},
		"as little as can be": {"--mtu", "1500", "--without", "VERSION_1,ANY_LAYOUT,MRG_RXBUF,EVENT_IDX,CSUM,GUEST_CSUM,PROTOCOL_FEATURES,MTU"},
	} {
		t.Run(name, func(t *testing.T) {
			a := startAttach(t, e.daemon.Socket, append(flags, "--address", guestIP+"/24", "--mac", attachMAC, "--stats")...)
			sizes := []int{56, 1472, 8972}
			if strings.HasPrefix(name, "as little") {
				sizes = sizes[:2]
			}
			a.ping(hostIP, sizes...)
			a.streams(l, l.Addr().String(), 4*mebibyte)
			a.stop()
			if out := a.Output(); strings.Contains(out, "dropped") {
				t.Errorf("output:\n%s", out)
			}
			if err := e.daemon.WaitConnected(false, 10*time.Second); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestAttachReconnect kills the back-end under an attachment, which goes on with the next one; without --reconnect it ends.
func TestAttachReconnect(t *testing.T) {
	e := newEnv(t, 1500)
	a := startAttach(t, e.daemon.Socket, "--address", guestIP+"/24", "--reconnect", "--stats")
	a.ping(hostIP)
	for range 2 {
		e.daemon.Kill()
		for end := time.Now().Add(20 * time.Second); a.link().Attrs().RawFlags&unix.IFF_LOWER_UP != 0; {
			if time.Now().After(end) {
				t.Fatal("the interface still has a carrier")
			}
			time.Sleep(20 * time.Millisecond)
		}
		e.startDaemon()
		a.ping(hostIP, 56)
	}
	a.stop()
	if out := a.Output(); !strings.Contains(out, "3 connections") {
		t.Errorf("output:\n%s", out)
	}
	b := startAttach(t, e.daemon.Socket, "--address", guestIP+"/24")
	e.daemon.Kill()
	if err := b.Wait(20 * time.Second); err == nil || b.ExitCode() != 1 || !strings.Contains(b.Output(), "the back-end closed the connection") {
		t.Errorf("%v, status %d, output:\n%s", err, b.ExitCode(), b.Output())
	}
	if b.ns.HasLink("eth0") {
		t.Error("the interface is still there")
	}
	e.startDaemon()
}

// TestAttachDeleted deletes the interface under an attachment, which ends with a reason.
func TestAttachDeleted(t *testing.T) {
	testmain.NeedTun(t)
	daemon := startPlain(t, "null")
	defer daemon.Kill()
	a := startAttach(t, daemon.Socket, "--reconnect")
	if err := a.ns.Do(func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}); err != nil {
		t.Fatal(err)
	}
	if err := a.Wait(20 * time.Second); err == nil || a.ExitCode() != 1 || !strings.Contains(a.Output(), "the interface was deleted") {
		t.Errorf("%v, status %d, output:\n%s", err, a.ExitCode(), a.Output())
	}
}
