package hostile

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

const patience = 10 * time.Second

// features are those of a driver without offloads.
const features = virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FNetMQ | virtio.FRingIndirectDesc

// programs are vhostd with and without the race detector, whose shadow memory leaves less address space.
var programs = map[bool]string{}

func TestMain(m *testing.M) {
	if path := os.Getenv(loadEnv); path != "" {
		fmt.Fprintln(os.Stderr, loadFrontEnd(path))
		os.Exit(1)
	}
	os.Setenv("GORACE", "atexit_sleep_ms=10")
	dir, err := os.MkdirTemp("", "vhostd-hostile")
	if err == nil {
		for _, race := range []bool{true, false} {
			if programs[race], err = rig.Build(dir, race); err != nil {
				break
			}
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:"))
	os.RemoveAll(dir)
	os.Exit(code)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// vhostd is a running program with the guests good and evil on one worker.
type vhostd struct {
	*rig.Process
	t   testing.TB
	dir string
	// killed says that the test has ended it on purpose.
	killed bool
}

// serve starts the program with the guests on the echo network. The test's end stops it and demands a clean end.
func serve(t testing.TB, race bool, extra ...string) *vhostd {
	t.Helper()
	return serveGuests(t, race, []string{
		"{name: good, socket: %s/good, network: echo, queue-pairs: 4}",
		"{name: evil, socket: %s/evil, network: echo, queue-pairs: 4}",
	}, extra...)
}

// serveGuests is serve with other guests, in which %s is the folder of the sockets.
func serveGuests(t testing.TB, race bool, guests []string, extra ...string) *vhostd {
	t.Helper()
	return serveIn(t, race, t.TempDir(), guests, extra...)
}

// serveIn is serveGuests with the sockets in a given folder.
func serveIn(t testing.TB, race bool, dir string, guests []string, extra ...string) *vhostd {
	t.Helper()
	d := &vhostd{t: t, dir: dir}
	text := "control: " + filepath.Join(d.dir, "control") + "\n" + strings.Join(extra, "\n") + "\nguests:\n"
	for _, guest := range guests {
		text += "- " + fmt.Sprintf(guest, d.dir) + "\n"
	}
	file := filepath.Join(d.dir, "vhostd.yaml")
	must(t, os.WriteFile(file, []byte(text), 0o600))
	p, err := rig.Start(nil, programs[race], "serve", "--config", file)
	must(t, err)
	d.Process = p
	t.Cleanup(d.end)
	must(t, p.WaitOutput("readiness line", patience, func(out string) bool { return strings.Contains(out, "listening") }))
	return d
}

func (d *vhostd) end() {
	err := d.Stop(patience)
	if sign := d.Trouble(); sign != "" {
		d.t.Errorf("%s in the output of vhostd:\n%s", sign, d.Excerpt())
	} else if err != nil && !d.killed || d.t.Failed() {
		d.t.Errorf("end of vhostd: %v; output:\n%s", err, d.Excerpt())
	}
}

func memory(t testing.TB, sizes ...uint64) *frontend.Memory {
	t.Helper()
	m, err := frontend.NewMemory(sizes...)
	must(t, err)
	t.Cleanup(func() { must(t, m.Close()) })
	return m
}

// guest connects a front-end as the named guest and starts pair 0.
func (d *vhostd) guest(name string, opts frontend.Options) (*frontend.Client, *frontend.Pair) {
	d.t.Helper()
	if opts.Features == 0 {
		opts.Features = features
	}
	if d.Process != nil { // a test may have started the program in its own way
		opts.Ended = d.Done()
	}
	c, err := frontend.Connect(filepath.Join(d.dir, name), memory(d.t, 64<<20, 64<<20), opts)
	must(d.t, err)
	d.t.Cleanup(func() { c.Close() })
	p, err := c.StartPair(0)
	must(d.t, err)
	must(d.t, c.Sync())
	return c, p
}

// ping sends a frame through the echo network and returns how long it took to come back.
func ping(t testing.TB, p *frontend.Pair) time.Duration {
	t.Helper()
	frame := bytes.Repeat([]byte{2}, 60)
	_, err := p.PostRx(4)
	must(t, err)
	begin := time.Now()
	must(t, p.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
	if _, _, err := p.RecvFrame(patience); err != nil {
		t.Fatalf("the good guest's frame did not come back: %v", err)
	}
	took := time.Since(begin)
	must(t, p.DrainTx(patience))
	return took
}

// worst pings for a while and returns the longest way.
func worst(t testing.TB, p *frontend.Pair, for_ time.Duration) (longest time.Duration) {
	t.Helper()
	for end := time.Now().Add(for_); time.Now().Before(end); time.Sleep(time.Millisecond) {
		longest = max(longest, ping(t, p))
	}
	return longest
}
