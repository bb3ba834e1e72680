package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

// TestRun boots a guest by `vhostd run`, as the README says it, with a policy, rates and a published port. The back-end is killed once;
// the guest powers off at the end, and nothing is left.
func TestRun(t *testing.T) {
	image, err := shared.image()
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	i := newInternet(t)
	serveEchoes(t, i)
	runtime := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", runtime)
	control := filepath.Join(runtime, "control.sock")
	const megabits = 16
	network := "user" + userPrefixes + ",search=example.test,deny=" + rig.Live4 + ":81,deny=[" + rig.Live6 + "]:81,deny=*.text.example.test,deny=" + rig.TextName +
		fmt.Sprintf(",rate-in=%dMbit,rate-out=%dMbit", megabits, megabits)
	vm, err := rig.StartVM(shared.folder, image, rig.VMConfig{CPUs: 2, Namespace: i.Namespace, Run: []string{
		i.Binary(), "run", "--network", network, "--publish", rig.Live4 + ":2222:" + echoPort, "--control", control,
	}})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, vm)
	if _, err := vm.Boot(); err != nil {
		t.Fatal(err)
	}
	e := &userEnv{Internet: i, vm: vm, daemon: rig.DialDaemon(vm.Process, control)}
	testUserAddresses(t, e)
	t.Run("card", func(t *testing.T) { testRunCard(t, e) })
	t.Run("policy", func(t *testing.T) { testRunPolicy(t, e) })
	t.Run("rates", func(t *testing.T) { testRunRates(t, e, megabits) })
	t.Run("published port", func(t *testing.T) { testRunPublished(t, e) })
	t.Run("back-end killed", func(t *testing.T) { testRunKilled(t, e) })
	e.call(t, guest.CommandPower, guest.PowerArgs{}, nil)
	if err := vm.Wait(time.Minute); err != nil {
		t.Errorf("vhostd run: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(runtime, "*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// testRunCard: the guest has as many queue pairs as processors.
func testRunCard(t *testing.T, e *userEnv) {
	var channels guest.Channels
	e.call(t, guest.CommandChannels, guest.ChannelsArgs{Name: "eth0"}, &channels)
	if channels.Max != 2 {
		t.Errorf("queue pairs: %+v", channels)
	}
}

// testRunPolicy: what is denied is not reached, is told as such, and is counted. Names that are denied are not resolved.
func testRunPolicy(t *testing.T, e *userEnv) {
	for _, host := range []string{rig.Live4, "[" + rig.Live6 + "]"} {
		listener, err := e.Listen(host + ":81")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		go guest.ServeStreams(listener, "hello from the host")
	}
	wantOutcome(t, e, rig.Live4+":81", guest.Unreachable, 20*time.Second)
	wantOutcome(t, e, "["+rig.Live6+"]:81", guest.Prohibited, 20*time.Second)
	wantOutcome(t, e, rig.Live4+":80", guest.Connected, 20*time.Second)
	if got := e.resolve(t, userGateway4, rig.TextName, "TXT"); len(got.Answers) > 0 || got.Code == "NOERROR" {
		t.Errorf("a denied name: %+v", got)
	}
	if got := e.resolve(t, userGateway4, rig.WebName, "A"); len(got.Answers) != 1 {
		t.Errorf("another name: %+v", got)
	}
	stats, err := e.daemon.Stats()
	if err != nil || stats.Drops()["port_policy"] < 2 {
		t.Errorf("drops %v, %v; want at least two by port_policy", stats.Drops(), err)
	}
}

// testRunRates: a transfer takes at least as long as the rate says, apart from the burst at its start.
func testRunRates(t *testing.T, e *userEnv, megabits int) {
	const n = 4 * mebibyte
	for _, toGuest := range []bool{false, true} {
		sent, received, err := e.ends(rig.Live4).Stream(n, 9, toGuest, patience)
		if err != nil || sent.SHA256 != received.SHA256 {
			t.Fatalf("to the guest %v: sent %+v, received %+v, %v", toGuest, sent, received, err)
		}
		rate := guest.Rate(n, received.Took)
		t.Logf("to the guest %v: %.1f Mbit/s of %d", toGuest, rate, megabits)
		if rate > float64(megabits)*1.1 {
			t.Errorf("to the guest %v: %.1f Mbit/s, %d are allowed", toGuest, rate, megabits)
		}
	}
}

func testRunPublished(t *testing.T, e *userEnv) {
	e.call(t, guest.CommandListen, guest.ListenArgs{Port: 7}, nil)
	conn, err := e.DialTCP(rig.Live4+":2222", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	wantGuestEcho(t, conn)
}

// testRunKilled: the back-end is started again, and the guest has its network back.
func testRunKilled(t *testing.T, e *userEnv) {
	pid := 0
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", e.vm.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		text, _ := os.ReadFile(name) // threads end
		for _, word := range strings.Fields(string(text)) {
			line, _ := os.ReadFile(filepath.Join("/proc", word, "cmdline"))
			if strings.Contains(string(line), "\x00serve\x00") {
				_, err = fmt.Sscan(word, &pid)
			}
		}
	}
	if pid == 0 || err != nil {
		t.Fatalf("no back-end among the children (%v)", err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := e.vm.WaitOutput("note about the restart", time.Minute, func(out string) bool { return strings.Contains(out, "is started again") }); err != nil {
		t.Fatal(err)
	}
	e.awaitWeb(t, rig.Live4)
	e.download(t, "http://"+rig.Live4, mebibyte)
}
