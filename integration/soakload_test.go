package integration

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

// soakLoad is one kind of traffic: rounds of it, one after the other, with a pause between.
type soakLoad struct {
	name  string
	ns    *rig.Namespace // whose thread is for this load alone
	pause time.Duration
	round func(n int, ns *rig.Namespace) error

	rounds, lost int
	failed       []error
}

// errLost is about datagrams that did not come, which some may under load.
var errLost = errors.New("lost")

// runLoads runs all loads until over is closed, and their last rounds to the end.
func runLoads(loads []*soakLoad, over <-chan struct{}) {
	var all sync.WaitGroup
	for _, l := range loads {
		all.Go(func() { l.run(over) })
	}
	all.Wait()
}

func (l *soakLoad) run(over <-chan struct{}) {
	for {
		select {
		case <-over:
			return
		case <-time.After(l.pause):
		}
		err := l.round(l.rounds, l.ns)
		switch l.rounds++; {
		case errors.Is(err, errLost):
			l.lost++
		case err != nil:
			l.failed = append(l.failed, fmt.Errorf("round %d: %w", l.rounds, err))
		}
	}
}

// judge demands that every round went well; of datagrams a tenth may be lost.
func (l *soakLoad) judge(t *testing.T) {
	t.Helper()
	t.Logf("%s: %d rounds, %d lost, %d failed", l.name, l.rounds, l.lost, len(l.failed))
	if l.rounds == 0 || l.lost > 1+l.rounds/10 {
		t.Errorf("%s: %d rounds, %d lost", l.name, l.rounds, l.lost)
	}
	for _, err := range l.failed[:min(len(l.failed), 5)] {
		t.Errorf("%s: %v (%d failed of %d)", l.name, err, len(l.failed), l.rounds)
	}
}

// addLoads makes the loads. Those from outside run in the host's namespace, the others in the guest's.
func (s *soak) addLoads() {
	s.t.Helper()
	inside := func(name string, pause time.Duration, round func(int, *rig.Namespace) error) {
		s.loads = append(s.loads, &soakLoad{name: name, ns: twin(s.t, s.guest.ns), pause: pause, round: round})
	}
	outside := func(name string, pause time.Duration, round func(int, *rig.Namespace) error) {
		s.loads = append(s.loads, &soakLoad{name: name, ns: twin(s.t, s.host.Namespace), pause: pause, round: round})
	}
	const moment = 10 * time.Millisecond
	for _, host := range []string{rig.Live4, rig.Live6} {
		at := net.JoinHostPort(host, echoPort)
		inside("bulk both ways, "+host, moment, func(_ int, ns *rig.Namespace) error { return echoStream(ns, at, 32*mebibyte) })
		inside("short connections, "+host, moment, func(n int, ns *rig.Namespace) error { return shortConnection(ns, at, n) })
		inside("one question, "+host, moment, func(n int, ns *rig.Namespace) error {
			return oneShot(ns, at, []int{64, 0, 1, 1472, 200, 9000, 500, 64}[n%8])
		})
	}
	inside("half-closed connections", 5*moment, s.dialogs())
	inside("names", 2*moment, func(n int, ns *rig.Namespace) error { return askName(ns, n) })
	inside("ping", 2*moment, pingRound)
	inside("connects that fail", 5*moment, failingConnect)
	inside("nonsense", moment, s.nonsense())
	outside("published, long", 20*moment, func(n int, ns *rig.Namespace) error {
		return echoStream(ns, net.JoinHostPort([]string{rig.Live4, rig.Live6}[n%2], "8080"), 4*mebibyte)
	})
	outside("published, short", moment, func(n int, ns *rig.Namespace) error {
		return shortConnection(ns, net.JoinHostPort([]string{rig.Live4, rig.Live6}[n%2], "8080"), n)
	})
	outside("published, datagrams", 2*moment, func(n int, ns *rig.Namespace) error {
		return oneShot(ns, net.JoinHostPort([]string{rig.Live4, rig.Live6}[n%2], "8080"), []int{64, 0, 1400, 9000}[n/2%4])
	})
	path := filepath.Join(s.host.Folder, "echo.sock")
	outside("published, Unix socket", 5*moment, func(int, *rig.Namespace) error {
		conn, err := net.Dial("unix", path)
		if err != nil {
			return err
		}
		return echoOver(conn, mebibyte)
	})
}

// echoStream sends n bytes to an echo service and wants them back.
func echoStream(ns *rig.Namespace, addr string, n int64) error {
	conn, err := ns.DialTCP(addr, patience)
	if err != nil {
		return err
	}
	return echoOver(conn, n)
}

func echoOver(conn net.Conn, n int64) error {
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := guest.ReadLine(conn); err != nil {
		return fmt.Errorf("greeting: %w", err)
	}
	type end struct {
		guest.StreamResult
		err error
	}
	sent := make(chan end, 1)
	go func() {
		var e end
		if e.StreamResult, e.err = guest.SendStream(conn, n, uint64(n)); e.err == nil {
			e.err = conn.(interface{ CloseWrite() error }).CloseWrite()
		}
		sent <- e
	}()
	back, err := guest.ReceiveStream(conn)
	if err != nil {
		conn.Close() // ends the sender
	}
	s := <-sent
	if err := errors.Join(s.err, err); err != nil {
		return err
	}
	if back.SHA256 != s.SHA256 {
		return fmt.Errorf("sent %+v, %+v came back", s.StreamResult, back)
	}
	return nil
}

// shortConnection exchanges a few bytes. Each third connection ends with a reset.
func shortConnection(ns *rig.Namespace, addr string, n int) error {
	conn, err := ns.DialTCP(addr, patience)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := guest.Trips(conn, guest.TripsArgs{Count: 1 + n%3, Size: 64, Timeout: patience}); err != nil {
		return err
	}
	if n%3 == 0 {
		return conn.SetLinger(0)
	}
	return nil
}

// oneShot sends a datagram from a new port and wants it back.
func oneShot(ns *rig.Namespace, addr string, size int) error {
	conn, err := ns.DialUDP(addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	result, err := guest.Sizes(conn, guest.SizesArgs{Sizes: []int{size}, Timeout: 5 * time.Second})
	if err == nil && len(result.Returned) != 1 {
		err = errLost
	}
	return err
}

// dialogs is a load whose connections are closed in one direction first, by either side.
func (s *soak) dialogs() func(int, *rig.Namespace) error {
	s.t.Helper()
	const guestSeed, hostSeed, bytes = 1, 2, mebibyte
	addrs := map[bool]string{}
	for _, guestFirst := range []bool{true, false} {
		listener, err := s.host.Listen(rig.Live4 + ":0")
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { listener.Close() })
		addrs[guestFirst] = listener.Addr().String()
		go func() {
			for conn, err := listener.Accept(); err == nil; conn, err = listener.Accept() {
				go func() {
					defer conn.Close()
					// What goes wrong here does so at the other end too.
					_, _ = guest.Dialog(conn.(*net.TCPConn), guest.DialogArgs{First: !guestFirst, Bytes: bytes, Seed: hostSeed, Timeout: patience})
				}()
			}
		}()
	}
	want, err := guest.SendStream(discard{}, bytes, hostSeed)
	if err != nil {
		s.t.Fatal(err)
	}
	return func(n int, ns *rig.Namespace) error {
		conn, err := ns.DialTCP(addrs[n%2 == 0], patience)
		if err != nil {
			return err
		}
		defer conn.Close()
		got, err := guest.Dialog(conn, guest.DialogArgs{First: n%2 == 0, Bytes: bytes, Seed: guestSeed, Timeout: patience})
		if err == nil && got.Received.SHA256 != want.SHA256 {
			err = fmt.Errorf("received %+v, want %+v", got.Received, want)
		}
		return err
	}
}

// askName asks one of several questions.
func askName(ns *rig.Namespace, n int) error {
	server := []string{userGateway4, userGateway6}[n%2]
	q := []struct {
		name, kind, code string
		answers          int
	}{
		{rig.WebName, "A", "NOERROR", 1}, {rig.WebName, "AAAA", "NOERROR", 1}, {rig.TextName, "TXT", "NOERROR", 1},
		{"no.example.test", "A", "NXDOMAIN", 0}, {"box.example.test", "A", "NOERROR", 1}, {rig.LargeName, "TXT", "NOERROR", rig.LargeRecords},
	}[n/2%6]
	return ns.Do(func() error {
		args := guest.ResolveArgs{Server: net.JoinHostPort(server, "53"), Name: q.name, Type: q.kind, Timeout: 20 * time.Second}
		got, err := guest.Resolve(args)
		if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
			return errLost
		}
		if err == nil && (got.Code != q.code || len(got.Answers) != q.answers) {
			err = fmt.Errorf("%s %s at %s: %+v", q.kind, q.name, server, got)
		}
		return err
	})
}

// pingRound pings hosts that are there with several sizes, and now and then one that is not.
func pingRound(n int, ns *rig.Namespace) error {
	dsts := []string{rig.Live4, rig.Live6, userGateway4, userGateway6, rig.Silent4, rig.Live4, rig.Live6}
	dst := dsts[n%len(dsts)]
	return ns.Do(func() error {
		pinger, err := guest.OpenPinger(dst)
		if err != nil {
			return err
		}
		defer pinger.Close()
		args := guest.PingArgs{Dst: dst, Size: []int{56, 1400, 8000}[n%3], Count: 2, Timeout: 5 * time.Second}
		if dst == rig.Silent4 {
			args.Timeout = 100 * time.Millisecond
		}
		result, err := pinger.Run(args)
		switch {
		case err != nil:
			return err
		case result.Corrupt > 0 || dst == rig.Silent4 && result.Received > 0:
			return fmt.Errorf("ping %s: %+v", dst, result)
		case dst != rig.Silent4 && result.Received < 2:
			return errLost
		}
		return nil
	})
}

// failingConnect makes a connection that is refused, has no way, or gets no answer and is given up.
func failingConnect(n int, ns *rig.Namespace) error {
	c := []struct{ addr, want string }{
		{rig.Live4 + ":81", guest.Refused}, {"[" + rig.Live6 + "]:81", guest.Refused},
		{rig.Unreached4 + ":80", guest.Unreachable}, {"[" + rig.Unreached6 + "]:80", guest.Unreachable}, {rig.Silent4 + ":80", guest.TimedOut},
	}[n%5]
	limit := patience
	if c.want == guest.TimedOut {
		limit = 200 * time.Millisecond
	}
	return ns.Do(func() error {
		conn, err := net.DialTimeout("tcp", c.addr, limit)
		if err == nil {
			conn.Close()
		}
		if got := guest.Outcome(err); got != c.want {
			return fmt.Errorf("connection to %s: %s, want %s", c.addr, got, c.want)
		}
		return nil
	})
}

// nonsense is a load of frames that mean nothing: any protocol, length and piece, from the guest's own addresses.
func (s *soak) nonsense() func(int, *rig.Namespace) error {
	s.t.Helper()
	mac := s.guest.link().Attrs().HardwareAddr
	fd := -1
	if err := s.guest.ns.Do(func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: l.Attrs().Index})
	}); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { unix.Close(fd) })
	head := append(append([]byte{0x52, 0x56, 10, 0, 2, 2}, mac...), 8, 0)
	return func(n int, _ *rig.Namespace) error {
		frame := make([]byte, 14+20+n%1400)
		_, _ = rand.Read(frame)
		copy(frame, head)
		frame[14] = 0x45 // what has another version is a short story
		if n%4 == 0 {
			frame[14] = frame[15] | 0x40
		}
		frame[23] = []byte{1, 6, 17, frame[23]}[n%4]
		copy(frame[26:], []byte{10, 0, 2, 15, 192, 0, 2, 1})
		if n%2 == 0 {
			sum4(frame[14:34])
		}
		_, err := unix.Write(fd, frame)
		if errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EAGAIN) {
			return errLost
		}
		return err
	}
}

// sum4 makes the length and the checksum of an IPv4 header right.
func sum4(h []byte) {
	h[10], h[11] = 0, 0
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(h[i])<<8 | uint32(h[i+1])
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	h[10], h[11] = byte(^sum>>8), byte(^sum)
}
