package integration

import (
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

// What the tests ask of the user network.
const (
	userGateway4, userGateway6 = "10.0.2.2", "fd00:77::1"
	userPrefixes               = ",subnet6=fd00:77::/64,gateway6=" + userGateway6
	echoPort                   = "7"
	patience                   = 10 * time.Minute // for anything that an emulated guest does on a busy machine
)

// userEnv is a namespace that plays the host and the Internet, with vhostd in it as an ordinary user, and a guest.
type userEnv struct {
	*rig.Internet
	params string // of the network
	daemon *rig.Daemon
	vm     *rig.VM
}

// ends is the guest's network seen with the live address of a protocol at the other side.
func (e *userEnv) ends(host string) rig.Ends {
	return rig.Ends{NS: e.Namespace, VM: e.vm, HostIP: host, GuestIP: "10.0.2.15"}
}

func newInternet(t *testing.T) *rig.Internet {
	t.Helper()
	testmain.NeedTun(t)
	internet, err := rig.NewInternet()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(internet.Close)
	return internet
}

// bootUser starts vhostd and boots a guest, which has no addresses yet.
func bootUser(t *testing.T, params func(*rig.Internet) string) *userEnv {
	t.Helper()
	image, err := shared.image()
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	e := &userEnv{Internet: newInternet(t)}
	e.params = params(e.Internet)
	e.start(t)
	t.Cleanup(func() {
		e.daemon.Kill()
		if t.Failed() {
			t.Logf("output of vhostd:\n%s", e.daemon.Output())
		}
	})
	if e.vm, err = rig.StartVM(shared.folder, image, rig.VMConfig{Socket: e.daemon.Socket}); err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, e.vm)
	if _, err := e.vm.Boot(); err != nil {
		t.Fatal(err)
	}
	return e
}

func closeAtEnd(t *testing.T, vm *rig.VM) {
	t.Cleanup(func() {
		vm.Close()
		if t.Failed() {
			t.Logf("console:\n%s", vm.Output())
		}
	})
}

// start starts vhostd, again on the same socket.
func (e *userEnv) start(t *testing.T) {
	t.Helper()
	daemon, err := e.StartDaemon(e.params)
	if err != nil {
		t.Fatal(err)
	}
	e.daemon = daemon
}

// call runs a command in the guest.
func (e *userEnv) call(t *testing.T, command string, args, result any) {
	t.Helper()
	if err := e.vm.Agent.Call(command, args, result, patience); err != nil {
		t.Fatal(err)
	}
}

// TestUser takes a guest through what people do with a user network. vhostd runs as an ordinary user, in the sandbox.
func TestUser(t *testing.T) {
	e := bootUser(t, func(i *rig.Internet) string {
		return userPrefixes + ",search=example.test,host=box.example.test:10.9.8.7" +
			",publish=" + rig.Live4 + ":8080:" + echoPort + ",publish=[" + rig.Live6 + "]:8080:" + echoPort +
			",publish=" + rig.Live4 + ":8080:" + echoPort + "/udp,publish=[" + rig.Live6 + "]:8080:" + echoPort + "/udp,publish=unix:" + filepath.Join(i.Folder, "echo.sock") + ":" + echoPort
	})
	serveEchoes(t, e.Internet)
	steps := []struct {
		name string
		run  func(*testing.T, *userEnv)
	}{
		{"addresses", testUserAddresses},
		{"names", testUserNames},
		{"web", testUserWeb},
		{"ping", testUserPing},
		{"connects that fail", testUserConnects},
		{"half-closed connections", testUserHalfClose},
		{"many connections at once", testUserMany},
		{"datagrams", testUserDatagrams},
		{"published ports", testUserPublished},
		{"latency under load", testUserLatency},
		{"loss and pauses", testUserLoss},
		{"resolver changes", testUserResolver},
		{"interface of the host down and up", testUserInterface},
		{"vhostd restarted", testUserRestart},
	}
	for _, step := range steps {
		if !t.Run(step.name, func(t *testing.T) { step.run(t, e) }) && step.name == "addresses" {
			t.Fatal("the rest needs the addresses")
		}
	}
	if err := e.vm.Quit(); err != nil {
		t.Errorf("QEMU: %v", err)
	}
	if err := e.daemon.Stop(); err != nil {
		t.Error(err)
	}
}

// serveEchoes runs echo services in the namespace until the test ends.
func serveEchoes(t *testing.T, i *rig.Internet) {
	t.Helper()
	for _, host := range []string{rig.Live4, rig.Live6} {
		listener, err := i.Listen(net.JoinHostPort(host, echoPort))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { listener.Close() })
		go guest.ServeStreams(listener, "hello from the host")
		conn, err := i.ListenPacket(net.JoinHostPort(host, echoPort))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		go guest.ServeEcho(conn)
	}
}

// testUserAddresses wants a lease with everything in it, and an IPv6 address of the advertised prefix.
func testUserAddresses(t *testing.T, e *userEnv) {
	up := true
	if _, err := e.vm.Link(guest.LinkArgs{Name: "eth0", Up: &up}); err != nil {
		t.Fatal(err)
	}
	lease := e.lease(t)
	if lease.CIDR != "10.0.2.15/24" || lease.Gateway != userGateway4 || !slices.Equal(lease.DNS, []string{userGateway4}) ||
		!slices.Equal(lease.Search, []string{"example.test"}) || lease.MTU != 1500 || lease.For < time.Hour {
		t.Errorf("lease: %+v", lease)
	}
	t.Logf("lease: %+v, IPv6 address %s", lease, e.address6(t, "fd00:77::/64"))
}

// lease gets a lease in the guest.
func (e *userEnv) lease(t *testing.T) (lease guest.Lease) {
	t.Helper()
	e.call(t, guest.CommandDHCP, guest.DHCPArgs{Name: "eth0", Timeout: time.Minute}, &lease)
	return lease
}

// address6 waits for an address of the prefix that is found to be unique.
func (e *userEnv) address6(t *testing.T, prefix string) string {
	t.Helper()
	_, network, err := net.ParseCIDR(prefix)
	if err != nil {
		t.Fatal(err)
	}
	var list guest.Addresses
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		e.call(t, guest.CommandAddress, guest.AddressArgs{Name: "eth0"}, &list)
		for _, a := range list {
			if ip, _, err := net.ParseCIDR(a.CIDR); err == nil && network.Contains(ip) && !a.Tentative && !a.Failed {
				return ip.String()
			}
		}
	}
	t.Fatalf("no address of %s: %+v", prefix, list)
	return ""
}

// testUserNames asks the forwarder over both protocols: every kind of record, those that are too long for a datagram, names that do not
// exist, and those that vhostd knows itself.
func testUserNames(t *testing.T, e *userEnv) {
	for _, server := range []string{userGateway4, userGateway6} {
		for _, tc := range []struct {
			name, kind, code string
			want             []string
		}{
			{rig.WebName, "A", "NOERROR", []string{rig.Live4}},
			{rig.WebName, "AAAA", "NOERROR", []string{rig.Live6}},
			{rig.TextName, "TXT", "NOERROR", []string{rig.TextRecord}},
			{rig.TextName, "MX", "NOERROR", nil},
			{"no.example.test", "A", "NXDOMAIN", nil},
			{"box.example.test", "A", "NOERROR", []string{"10.9.8.7"}},
			{"host.vhostd.internal", "A", "NOERROR", []string{userGateway4}},
			{"host.vhostd.internal", "AAAA", "NOERROR", []string{userGateway6}},
		} {
			if got := e.resolve(t, server, tc.name, tc.kind); got.Code != tc.code || !slices.Equal(got.Answers, tc.want) || got.TCP {
				t.Errorf("%s %s at %s: %+v, want %s %q", tc.name, tc.kind, server, got, tc.code, tc.want)
			}
		}
		large := e.resolve(t, server, rig.LargeName, "TXT")
		if !large.TCP || len(large.Answers) != rig.LargeRecords || !strings.HasPrefix(large.Answers[1], `"bbb`) {
			t.Errorf("%s at %s: over TCP %v, %d records", rig.LargeName, server, large.TCP, len(large.Answers))
		}
	}
}

func (e *userEnv) resolve(t *testing.T, server, name, kind string) (result guest.ResolveResult) {
	t.Helper()
	args := guest.ResolveArgs{Server: net.JoinHostPort(server, "53"), Name: name, Type: kind, Timeout: 20 * time.Second}
	e.call(t, guest.CommandResolve, args, &result)
	return result
}

// testUserWeb gets and puts bytes over HTTP: by name, and over each protocol.
func testUserWeb(t *testing.T, e *userEnv) {
	var page guest.FetchResult
	e.call(t, guest.CommandFetch, guest.FetchArgs{URL: "http://" + strings.TrimSuffix(rig.WebName, ".example.test") + "/", Timeout: patience}, &page)
	if page.Status != 200 || page.Text != guest.WebPage {
		t.Errorf("page: %+v", page)
	}
	n := int64(rounds(16, 256)) * mebibyte
	for _, host := range []string{rig.Live4, "[" + rig.Live6 + "]"} {
		got := e.download(t, "http://"+host, n)
		var put guest.FetchResult
		e.call(t, guest.CommandFetch, guest.FetchArgs{URL: "http://" + host + "/upload", Upload: n, Seed: 3, Timeout: patience}, &put)
		if put.Status != 200 || put.Bytes != n || put.SHA256 != put.Text {
			t.Errorf("upload to %s: %+v", host, put)
		}
		t.Logf("%s: %d MiB down with %.0f Mbit/s, up with %.0f Mbit/s, digests equal", host, n/mebibyte, guest.Rate(n, got.Took), guest.Rate(n, put.Took))
	}
}

// download gets n bytes and wants them intact.
func (e *userEnv) download(t *testing.T, url string, n int64) (got guest.FetchResult) {
	t.Helper()
	e.call(t, guest.CommandFetch, guest.FetchArgs{URL: url + "/bytes/" + decimal(n), Timeout: patience}, &got)
	want, err := guest.SendStream(discard{}, n, uint64(n))
	if err != nil || got.Status != 200 || got.Bytes != n || got.SHA256 != want.SHA256 {
		t.Errorf("download from %s: %+v, want %s, %v", url, got, want.SHA256, err)
	}
	return got
}

// testUserPing: a host that is there answers, others do not (NAT-11).
func testUserPing(t *testing.T, e *userEnv) {
	const count = 3
	ping := func(dst string, size, want int, timeout time.Duration) {
		var result guest.PingResult
		args := guest.PingArgs{Dst: dst, Size: size, Count: count, Timeout: timeout}
		if err := e.vm.Agent.Call(guest.CommandPing, args, &result, patience); err != nil || result.Received != want || result.Corrupt > 0 {
			t.Errorf("ping %s with %d bytes: %+v, %v, want %d answers", dst, size, result, err, want)
		}
	}
	for _, dst := range []string{rig.Live4, rig.Live6} {
		ping(dst, 56, count, 10*time.Second)
		ping(dst, 1472, count, 10*time.Second)
		ping(dst, 8000, count, 10*time.Second)
	}
	ping(userGateway4, 56, count, 10*time.Second)
	ping(userGateway6, 56, count, 10*time.Second)
	var silence sync.WaitGroup
	for _, dst := range []string{rig.Silent4, rig.Silent6, rig.Unreached4, rig.Unreached6} {
		silence.Go(func() { ping(dst, 56, 0, time.Second) })
	}
	silence.Wait()
}

// testUserConnects: the guest is told why a connection cannot be made, as if it were on the host's network itself (NAT-15).
func testUserConnects(t *testing.T, e *userEnv) {
	var silence sync.WaitGroup
	for _, host := range []string{rig.Silent4, "[" + rig.Silent6 + "]"} {
		silence.Go(func() { wantOutcome(t, e, host+":80", guest.TimedOut, 3*time.Second) })
	}
	for _, tc := range []struct{ addr, want string }{
		{rig.Live4 + ":" + echoPort, guest.Connected}, {"[" + rig.Live6 + "]:" + echoPort, guest.Connected},
		{rig.Live4 + ":81", guest.Refused}, {"[" + rig.Live6 + "]:81", guest.Refused},
		{rig.Unreached4 + ":80", guest.Unreachable}, {"[" + rig.Unreached6 + "]:80", guest.Unreachable},
		{userGateway4 + ":80", guest.Refused},         // the host's loopback is not reached without host-loopback=on
		{"169.254.169.254:80", guest.Unreachable},     // nor are metadata services
		{"[fd00:ec2::254]:80", guest.Prohibited},      // IPv6 has a word for it
		{"127.0.0.1:" + echoPort, guest.Refused},      // the guest's own
		{rig.Live4 + ":" + echoPort, guest.Connected}, // none of this has done harm
	} {
		wantOutcome(t, e, tc.addr, tc.want, 20*time.Second)
	}
	silence.Wait()
}

// wantOutcome may be called from any goroutine.
func wantOutcome(t *testing.T, e *userEnv, addr, want string, timeout time.Duration) {
	t.Helper()
	var result guest.ConnectResult
	err := e.vm.Agent.Call(guest.CommandConnect, guest.ConnectArgs{Addr: addr, Timeout: timeout}, &result, patience)
	if err != nil || result.Outcomes[want] != 1 {
		t.Errorf("connection to %s: %v after %v, %v, want %s", addr, result.Outcomes, result.Took, err, want)
	}
}

// testUserHalfClose: each side may send its end first, and the other one's bytes arrive all the same (NAT-03).
func testUserHalfClose(t *testing.T, e *userEnv) {
	for _, host := range []string{rig.Live4, rig.Live6} {
		for _, guestFirst := range []bool{true, false} {
			listener, err := e.Listen(net.JoinHostPort(host, "0"))
			if err != nil {
				t.Fatal(err)
			}
			type end struct {
				guest.DialogResult
				err error
			}
			onHost := make(chan end, 1)
			go func() {
				var e end
				defer func() { onHost <- e }()
				conn, err := listener.Accept()
				if e.err = err; err == nil {
					defer conn.Close()
					e.DialogResult, e.err = guest.Dialog(conn.(*net.TCPConn), guest.DialogArgs{First: !guestFirst, Bytes: 3 * mebibyte, Seed: 2, Timeout: patience})
				}
			}()
			var inGuest guest.DialogResult
			args := guest.DialogArgs{Addr: listener.Addr().String(), First: guestFirst, Bytes: 2 * mebibyte, Seed: 1, Timeout: patience}
			e.call(t, guest.CommandDialog, args, &inGuest)
			listener.Close()
			other := <-onHost
			if other.err != nil || inGuest.Sent.SHA256 != other.Received.SHA256 || inGuest.Received.SHA256 != other.Sent.SHA256 ||
				other.Received.Bytes != 2*mebibyte || inGuest.Received.Bytes != 3*mebibyte {
				t.Errorf("%s, the guest ends first: %v: in the guest %+v, on the host %+v", host, guestFirst, inGuest, other)
			}
		}
	}
}

// testUserMany opens connections all at once (NAT-01), while others wait for a host that does not answer (NAT-02).
func testUserMany(t *testing.T, e *userEnv) {
	n := rounds(200, 1000)
	dead := make(chan error, 1)
	go func() {
		args := guest.ConnectArgs{Addr: rig.Silent4 + ":80", Count: 100, Timeout: time.Duration(rounds(8, 20)) * time.Second}
		dead <- e.vm.Agent.Call(guest.CommandConnect, args, nil, patience)
	}()
	for _, host := range []string{rig.Live4, rig.Live6} {
		var result guest.ConnectResult
		args := guest.ConnectArgs{Addr: net.JoinHostPort(host, echoPort), Count: n, Echo: true, Timeout: patience}
		e.call(t, guest.CommandConnect, args, &result)
		if result.Outcomes[guest.Connected] != n {
			t.Errorf("%d connections to %s: %v", n, host, result.Outcomes)
		}
		t.Logf("%d connections to %s: all open and answered after %v", n, host, result.Took)
	}
	if err := <-dead; err != nil {
		t.Error(err)
	}
}

// testUserDatagrams: many of two usual sizes, and one each of unusual ones.
func testUserDatagrams(t *testing.T, e *userEnv) {
	for _, host := range []string{rig.Live4, rig.Live6} {
		checkDatagrams(t, e.ends(host), 64, 1200)
		checkSizes(t, e, net.JoinHostPort(host, echoPort))
	}
}

func checkSizes(t *testing.T, e *userEnv, addr string) {
	t.Helper()
	want := []int{0, 1, 1472, 9000, 65000}
	var result guest.SizesResult
	e.call(t, guest.CommandSizes, guest.SizesArgs{Addr: addr, Sizes: want, Timeout: 10 * time.Second}, &result)
	if !slices.Equal(result.Returned, want) {
		t.Errorf("datagrams to %s: %v came back of %v (%d tries)", addr, result.Returned, want, result.Tries)
	}
}
