package cases

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/control"
	daemonapi "github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// program is vhostd, built once with the race detector.
var program string

const (
	patience = 10 * time.Second       // for anything that must happen on a machine that is busy with other tests
	prompt   = 100 * time.Millisecond // how soon the cases want an answer; see soon
	quiet    = 100 * time.Millisecond // how long something that must not happen is watched
	raceExit = 66                     // exit status of a program in which the race detector found something
)

func TestMain(m *testing.M) {
	// The race detector lets a program that ends sleep for a second, which every test would pay.
	os.Setenv("GORACE", "atexit_sleep_ms=10")
	dir, err := os.MkdirTemp("", "vhostd-cases")
	if err == nil {
		program, err = rig.Build(dir, true)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:"))
	os.RemoveAll(dir)
	os.Exit(code)
}

// long says whether the rounds of the case itself are wanted instead of a few.
func long() bool { return os.Getenv("VHOSTD_LONG") == "1" }

// rounds is the number of rounds of a case: short in every run, full with VHOSTD_LONG=1.
func rounds(short, full int) int {
	if long() {
		return full
	}
	return short
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// vhostd is a running program with the guest vm0.
type vhostd struct {
	*rig.Process
	program string
	t       testing.TB
	ns      *rig.Namespace // nil: that of the test
	args    []string
	path    string // of the vhost-user socket
	control string
}

// serve starts vhostd with one guest on the network. The test's end stops it and demands a clean end.
func serve(t testing.TB, network string, flags ...string) *vhostd {
	t.Helper()
	d := prepare(t, network, flags...)
	d.start()
	return d
}

// prepare is serve without the start.
func prepare(t testing.TB, network string, flags ...string) *vhostd {
	dir := t.TempDir()
	d := &vhostd{t: t, program: program, path: filepath.Join(dir, "vm"), control: filepath.Join(dir, "control")}
	d.args = append([]string{"serve", "--socket", d.path, "--network", network, "--control", d.control}, flags...)
	return d
}

// start starts the program, also after stop and kill, and waits until it listens.
func (d *vhostd) start() {
	d.t.Helper()
	p, err := rig.Start(d.ns, d.program, d.args...)
	must(d.t, err)
	d.Process = p
	d.t.Cleanup(func() { d.end(p) })
	must(d.t, p.WaitOutput("readiness line", patience, func(out string) bool {
		return strings.Contains(out, "listening") || strings.Contains(out, "waiting for the front-end") || strings.Contains(out, "connected to the front-end")
	}))
}

// end stops p, unless it was stopped or killed, and looks for what must not be in its output.
func (d *vhostd) end(p *rig.Process) {
	d.t.Helper()
	err := p.Stop(patience)
	if d.check(p); p.Trouble() != "" {
		return
	}
	if err != nil && !killed(err) {
		d.t.Errorf("end of vhostd: %v; output:\n%s", err, p.Excerpt())
	} else if d.t.Failed() {
		d.t.Logf("output of vhostd:\n%s", p.Excerpt())
	}
}

func (d *vhostd) check(p *rig.Process) {
	d.t.Helper()
	switch sign := p.Trouble(); {
	case sign != "":
		d.t.Errorf("%s in the output of vhostd:\n%s", sign, p.Excerpt())
	case p.ExitCode() == raceExit:
		d.t.Errorf("the race detector found something; output of vhostd:\n%s", p.Excerpt())
	}
}

func killed(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.ExitCode() < 0
}

// stop ends the program as a service manager does.
func (d *vhostd) stop() {
	d.t.Helper()
	must(d.t, d.Stop(patience))
	d.check(d.Process)
}

// kill ends it without a chance to clean up.
func (d *vhostd) kill() {
	d.t.Helper()
	d.Kill()
	d.check(d.Process)
}

func (d *vhostd) get(url string, v any) {
	d.t.Helper()
	body, err := control.Get(context.Background(), d.control, url)
	must(d.t, err)
	must(d.t, json.Unmarshal(body, v))
}

// status is the guest's condition as the control socket tells it.
func (d *vhostd) status() daemonapi.GuestStatus {
	d.t.Helper()
	var s daemonapi.Status
	d.get("/v1/status", &s)
	for _, g := range s.Guests {
		if g.Name == "vm0" {
			return g
		}
	}
	d.t.Fatalf("vm0 is not in the status: %+v", s)
	return daemonapi.GuestStatus{}
}

// stats are the guest's counters.
func (d *vhostd) stats() daemonapi.GuestStats {
	d.t.Helper()
	var s daemonapi.Stats
	d.get("/v1/stats", &s)
	for _, g := range s.Guests {
		if g.Name == "vm0" {
			return g
		}
	}
	d.t.Fatalf("vm0 has no counters: %+v", s)
	return daemonapi.GuestStats{}
}

// ring returns the counters of ring i, zero if it has none yet.
func (d *vhostd) ring(i int) daemonapi.RingStats {
	d.t.Helper()
	for _, r := range d.stats().Rings {
		if r.Index == i {
			return r
		}
	}
	return daemonapi.RingStats{Index: i}
}

// drops is the number of dropped packets of ring i for any reason.
func (d *vhostd) drops(i int) (n uint64) {
	d.t.Helper()
	for _, v := range d.ring(i).Drops {
		n += v
	}
	return n
}

// eventually waits for something that the program does in its own time.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// disconnected waits until vhostd has taken its last front-end down.
func (d *vhostd) disconnected() {
	d.t.Helper()
	eventually(d.t, "no front-end is connected", func() bool { return !d.status().Connected })
}

// use is what the program holds of the system's resources.
type use struct {
	files, maps, memfds, threads int
	rss                          int // KiB
}

// use reads it from /proc.
func (d *vhostd) use() use {
	d.t.Helper()
	dir := filepath.Join("/proc", fmt.Sprint(d.PID()))
	entries, err := os.ReadDir(filepath.Join(dir, "fd"))
	must(d.t, err)
	maps, err := os.ReadFile(filepath.Join(dir, "maps"))
	must(d.t, err)
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	must(d.t, err)
	u := use{files: len(entries), maps: bytes.Count(maps, []byte("\n")), memfds: bytes.Count(maps, []byte("/memfd:vhost-user-frontend"))}
	for line := range strings.Lines(string(status)) {
		_, _ = fmt.Sscanf(line, "Threads: %d", &u.threads)
		_, _ = fmt.Sscanf(line, "VmRSS: %d", &u.rss)
	}
	return u
}

// flat demands that the program holds no more than at base: descriptors and guest memory exactly, other mappings, threads and
// resident memory up to what the Go runtime and the race detector add by themselves. The detector never gives back what it keeps of
// goroutines and descriptors that are gone; TestMEM11_ResidentMemory judges a program without it.
func (d *vhostd) flat(base use) {
	d.t.Helper()
	const slackThreads = 4
	// The collector lets garbage grow to the size of the heap and of all global data, and the race detector keeps several times that.
	slackMaps, slackRSS := rounds(24, 400), rounds(128<<10, 1<<20)
	var now use
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		now = d.use()
		if now.files <= base.files && now.memfds <= base.memfds && now.maps <= base.maps+slackMaps &&
			now.threads <= base.threads+slackThreads && now.rss <= base.rss+base.rss/20+slackRSS {
			return
		}
		if time.Now().After(end) {
			d.t.Errorf("not flat: %+v, was %+v", now, base)
			return
		}
	}
}

// memory is the guest memory of rig (a): 64 MiB at 0 and at 4 GiB, unless other sizes are given.
func memory(t testing.TB, sizes ...uint64) *frontend.Memory {
	t.Helper()
	if len(sizes) == 0 {
		sizes = []uint64{64 << 20, 64 << 20}
	}
	m, err := frontend.NewMemory(sizes...)
	must(t, err)
	t.Cleanup(func() { must(t, m.Close()) })
	return m
}

// plain are the features of an ordinary driver without offloads.
const plain = virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FNetMQ | virtio.FRingIndirectDesc | virtio.FRingEventIdx

// dial connects a bare connection.
func (d *vhostd) dial() *frontend.Conn {
	d.t.Helper()
	var c *frontend.Conn
	eventually(d.t, "the socket takes one more connection", func() (ok bool) {
		var err error
		if c, err = frontend.Dial(d.path); errors.Is(err, unix.EAGAIN) {
			return false // many at once, and the backlog is full
		}
		must(d.t, err)
		return true
	})
	d.t.Cleanup(func() { c.Close() })
	return c
}

// connect connects a front-end that has negotiated and shared its memory.
func (d *vhostd) connect(mem *frontend.Memory, opts frontend.Options) *frontend.Client {
	d.t.Helper()
	opts.Ended = d.Done()
	c, err := frontend.Connect(d.path, mem, opts)
	must(d.t, err)
	d.t.Cleanup(func() { c.Close() })
	return c
}

// pair starts queue pair i and waits until vhostd has enabled it: what a driver sends on a disabled ring is thrown away.
func pair(t testing.TB, c *frontend.Client, i int) *frontend.Pair {
	t.Helper()
	p, err := c.StartPair(i)
	must(t, err)
	must(t, c.Sync())
	return p
}

// frameOf is a frame of n bytes with an Ethernet header when it is long enough, whose bytes depend on seed.
func frameOf(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i) + seed
	}
	if n >= 14 {
		copy(b, []byte{0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x88, 0xb5}) // a local experimental EtherType
	}
	return b
}

// flows demands that the next ordinary frame still flows: out on the pair and, the network being echo, back within prompt.
func flows(t testing.TB, p *frontend.Pair) {
	t.Helper()
	if _, err := p.PostRx(4); err != nil {
		t.Fatal(err)
	}
	want := frameOf(60, 0x5a)
	must(t, p.SendTx(virtio.NetHdr{}, want, frontend.Direct))
	expect(t, p, want)
	must(t, p.DrainTx(patience))
}

// expect waits for a frame of the echo network, which exchanges the addresses.
func expect(t testing.TB, p *frontend.Pair, sent []byte) {
	t.Helper()
	begin := time.Now()
	_, got, err := p.RecvFrame(patience)
	if err != nil {
		t.Fatalf("the frame did not come back: %v", err)
	}
	soon(t, "the frame came back", begin)
	if want := swapped(sent); !bytes.Equal(got, want) {
		t.Fatalf("got a frame of %d bytes\n% x\nwant %d bytes\n% x", len(got), head(got), len(want), head(want))
	}
}

func head(b []byte) []byte { return b[:min(len(b), 64)] }

// swapped is what the echo network makes of a frame.
func swapped(frame []byte) []byte {
	b := bytes.Clone(frame)
	if len(b) >= 12 {
		copy(b, frame[6:12])
		copy(b[6:], frame[:6])
	}
	return b
}

// soon demands that what began at begin took about as long as the cases allow. Twenty times the limit is given away to the race
// detector, the emulated machine and the tests that run beside this one; a lost wake-up takes forever, not longer.
func soon(t testing.TB, what string, begin time.Time) {
	t.Helper()
	if d := time.Since(begin); d > 20*prompt {
		t.Errorf("%s after %v, want at most %v", what, d, prompt)
	}
}

// connectLater retries until the socket takes connections again.
func (d *vhostd) connectLater(mem *frontend.Memory, opts frontend.Options) *frontend.Client {
	d.t.Helper()
	var c *frontend.Client
	opts.Ended = d.Done()
	eventually(d.t, "vhostd takes a front-end", func() bool {
		var err error
		c, err = frontend.Connect(d.path, mem, opts)
		return err == nil
	})
	d.t.Cleanup(func() { c.Close() })
	return c
}
