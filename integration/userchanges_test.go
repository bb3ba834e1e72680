package integration

import (
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

// discard is a writer that knows nothing but Write.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

func decimal(n int64) string { return strconv.FormatInt(n, 10) }

// testUserPublished reaches the guest's services from the host: over both protocols, which show the client's own address, by datagrams,
// and through a Unix socket.
func testUserPublished(t *testing.T, e *userEnv) {
	port, err := strconv.Atoi(echoPort)
	if err != nil {
		t.Fatal(err)
	}
	e.call(t, guest.CommandListen, guest.ListenArgs{Port: port}, nil)
	for _, host := range []string{rig.Live4, rig.Live6} {
		conn, err := e.DialTCP(net.JoinHostPort(host, "8080"), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if line := wantGuestEcho(t, conn); !strings.HasSuffix(line, " "+conn.LocalAddr().String()) {
			t.Errorf("the guest saw %q, the client is %v", line, conn.LocalAddr())
		}
	}
	conn, err := net.Dial("unix", filepath.Join(e.Folder, "echo.sock"))
	if err != nil {
		t.Fatal(err)
	}
	wantGuestEcho(t, conn)

	for _, host := range []string{rig.Live4, rig.Live6} {
		datagrams, err := e.DialUDP(net.JoinHostPort(host, "8080"))
		if err != nil {
			t.Fatal(err)
		}
		defer datagrams.Close()
		want := []int{0, 1, 1472, 9000, 60000}
		result, err := guest.Sizes(datagrams, guest.SizesArgs{Sizes: want, Timeout: 10 * time.Second})
		if err != nil || !slices.Equal(result.Returned, want) {
			t.Errorf("datagrams to the guest by %s: %+v, %v, want %v", host, result, err, want)
		}
	}
}

// wantGuestEcho talks to the guest's echo service and closes its own direction first. It returns the greeting.
func wantGuestEcho(t *testing.T, conn net.Conn) string {
	t.Helper()
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	line, err := guest.ReadLine(conn)
	if err != nil || !strings.HasPrefix(line, "hello from the guest ") {
		t.Errorf("greeting %q, %v", line, err)
	}
	sent := make(chan guest.StreamResult, 1)
	go func() {
		result, err := guest.SendStream(conn, mebibyte, 5)
		if err == nil {
			err = conn.(interface{ CloseWrite() error }).CloseWrite()
		}
		if err != nil {
			t.Errorf("send: %v", err)
		}
		sent <- result
	}()
	back, err := guest.ReceiveStream(conn)
	if s := <-sent; err != nil || back.SHA256 != s.SHA256 {
		t.Errorf("sent %+v, %+v came back, %v", s, back, err)
	}
	return line
}

// testUserLatency measures what a request takes while a bulk transfer fills the network. How long is for the log: the guest is emulated.
func testUserLatency(t *testing.T, e *userEnv) {
	args := guest.TripsArgs{Addr: net.JoinHostPort(rig.Live4, echoPort), Count: 200, Size: 64, Timeout: patience}
	var idle, busy guest.TripsResult
	e.call(t, guest.CommandTrips, args, &idle)
	for _, toGuest := range []bool{false, true} {
		ended := make(chan error, 1)
		go func() {
			sent, received, err := e.ends(rig.Live4).Stream(int64(rounds(16, 256))*mebibyte, 1, toGuest, patience)
			if err == nil && sent.SHA256 != received.SHA256 {
				t.Errorf("bulk transfer, to the guest %v: sent %+v, received %+v", toGuest, sent, received)
			}
			ended <- err
		}()
		e.call(t, guest.CommandTrips, args, &busy)
		if err := <-ended; err != nil {
			t.Errorf("bulk transfer, to the guest %v: %v", toGuest, err)
		}
		t.Logf("request and answer: idle %v (99 %%: %v); under load towards the guest %v: %v (99 %%: %v)", idle.Median, idle.P99, toGuest, busy.Median, busy.P99)
	}
}

// testUserResolver: another resolver in resolv.conf is asked from then on.
func testUserResolver(t *testing.T, e *userEnv) {
	for _, resolver := range []string{rig.OtherResolver, rig.Resolver} {
		if err := e.SetResolver(resolver); err != nil {
			t.Fatal(err)
		}
		var got guest.ResolveResult
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
			if got = e.resolve(t, userGateway4, rig.WhoName, "A"); slices.Equal(got.Answers, []string{resolver}) {
				break
			}
		}
		if !slices.Equal(got.Answers, []string{resolver}) {
			t.Errorf("resolv.conf names %s, the answer came from %q", resolver, got.Answers)
		}
	}
}

// testUserInterface: while the host has lost a network the guest is told so, and afterwards everything works at once.
func testUserInterface(t *testing.T, e *userEnv) {
	listener, err := e.Listen(":9000")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go guest.ServeStreams(listener, "hello from the host")
	addrs := []string{rig.Interface4 + ":9000", "[" + rig.Interface6 + "]:9000"}
	for range rounds(2, 20) {
		for _, up := range []bool{true, false, true} {
			if err := e.SetInterface(up); err != nil {
				t.Fatal(err)
			}
			want := guest.Unreachable
			if up {
				want = guest.Connected
			}
			for _, addr := range addrs {
				wantOutcome(t, e, addr, want, 20*time.Second)
			}
		}
	}
}

// testUserRestart: the guest keeps its addresses over the end of vhostd, and has its network back.
func testUserRestart(t *testing.T, e *userEnv) {
	for i := range rounds(2, 20) {
		if i%2 == 0 {
			e.daemon.Kill()
		} else if err := e.daemon.Stop(); err != nil {
			t.Error(err)
		}
		e.start(t)
		if err := e.daemon.WaitConnected(true, time.Minute); err != nil {
			t.Fatal(err)
		}
		for _, host := range []string{rig.Live4, "[" + rig.Live6 + "]"} {
			e.awaitWeb(t, host)
			e.download(t, "http://"+host, mebibyte)
		}
		if lease := e.lease(t); lease.CIDR != "10.0.2.15/24" {
			t.Errorf("lease of the new process: %+v", lease)
		}
	}
}

// awaitWeb waits until the guest reaches a web server.
func (e *userEnv) awaitWeb(t *testing.T, host string) {
	t.Helper()
	start := time.Now()
	var result guest.ConnectResult
	for time.Since(start) < time.Minute {
		e.call(t, guest.CommandConnect, guest.ConnectArgs{Addr: host + ":80", Timeout: 5 * time.Second}, &result)
		if result.Outcomes[guest.Connected] == 1 {
			t.Logf("%s is reached again after %v", host, time.Since(start).Round(time.Millisecond))
			return
		}
	}
	t.Fatalf("%s is not reached: %v", host, result.Outcomes)
}
