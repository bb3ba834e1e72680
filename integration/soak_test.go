package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

// soakLength is how long the load lasts: VHOSTD_SOAK, such as 20m. Without it there is no soak; `make test-long` has one of two minutes.
func soakLength(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("VHOSTD_SOAK")
	if text == "" {
		t.Skip("long: a soak, which runs with VHOSTD_SOAK=20m or any other duration (make test-long: 2m)")
	}
	length, err := time.ParseDuration(text)
	if err != nil || length < 10*time.Second {
		t.Fatalf("VHOSTD_SOAK=%q: a duration of at least 10s is wanted, such as 20m", text)
	}
	return length
}

// holding is what the processes hold while nothing is under way, or at one moment of the load.
type holding struct {
	files, goroutines, pages, inFlight, flows int // of vhostd serve
	resident, heap, idle                      int // KiB: all, the heap in use, and what of it waits to be used or given back
	mapped                                    int // mappings
	attachFiles, attachResident               int
}

func (h holding) String() string {
	return fmt.Sprintf("%d descriptors, %d goroutines, %d pages of the arena (%d in flight), %d mappings, "+
		"%d KiB resident (heap %d, idle %d), %d flows; attach: %d descriptors, %d KiB", h.files, h.goroutines, h.pages,
		h.inFlight, h.mapped, h.resident, h.heap, h.idle, h.flows, h.attachFiles, h.attachResident)
}

// soak is a namespace attached to a user network, and everything that puts load on it.
type soak struct {
	t      *testing.T
	host   *rig.Internet
	daemon *rig.Daemon
	guest  *attachment
	loads  []*soakLoad
}

// TestSoak puts a mixed load on a user network for as long as VHOSTD_SOAK says. What vhostd holds at rest after the load is what it held at
// rest after a shorter one before: descriptors, goroutines, pages; and its resident memory, at rest and under load, is within 5 %.
func TestSoak(t *testing.T) {
	length := soakLength(t)
	s := startSoak(t)
	// The arena's pages are touched one after the other, and the heap grows to its working size.
	warm := min(max(length/4, time.Minute), 4*time.Minute)
	s.run(warm)
	start := s.rest(holding{})
	t.Logf("at rest after %v: %v", warm, start)
	under := s.run(length)
	end := s.rest(start)
	t.Logf("at rest after %v more: %v", length, end)
	s.judge(start, end, under)
	for _, l := range s.loads {
		l.judge(t)
	}
	s.guest.stop()
	if err := s.daemon.Stop(); err != nil {
		t.Error(err)
	}
}

func startSoak(t *testing.T) *soak {
	t.Helper()
	t.Setenv("GOGC", "50") // the heap is little more than what is reachable, so that what stays shows
	s := &soak{t: t, host: newInternet(t)}
	var err error
	s.daemon, err = s.host.StartDaemon(userPrefixes + ",host=box.example.test:10.9.8.7" +
		",publish=" + rig.Live4 + ":8080:" + echoPort + ",publish=[" + rig.Live6 + "]:8080:" + echoPort +
		",publish=" + rig.Live4 + ":8080:" + echoPort + "/udp,publish=[" + rig.Live6 + "]:8080:" + echoPort + "/udp" +
		",publish=unix:" + filepath.Join(s.host.Folder, "echo.sock") + ":" + echoPort)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.daemon.Kill()
		if t.Failed() {
			t.Logf("output of vhostd:\n%s", s.daemon.Output())
		}
	})
	serveEchoes(t, s.host)
	s.guest = startAttach(t, s.daemon.Socket, "--dhcp")
	s.guest.awaitIPv6("fd00:77:")
	listener, err := s.guest.ns.Listen(":" + echoPort)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go guest.ServeStreams(listener, "hello from the guest")
	datagrams, err := s.guest.ns.ListenPacket(":" + echoPort)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { datagrams.Close() })
	go guest.ServeEcho(datagrams)
	s.addLoads()
	return s
}

// run puts the load on for a time. It returns what was held at moments of it.
func (s *soak) run(length time.Duration) (samples []holding) {
	s.t.Helper()
	defer s.startLoads()() // before the namespaces go, whatever happens
	tick := time.NewTicker(max(length/240, time.Second))
	defer tick.Stop()
	note := time.Now()
	for end := time.Now().Add(length); time.Now().Before(end); <-tick.C {
		samples = append(samples, s.holding())
		if time.Since(note) > time.Minute {
			note = time.Now()
			s.t.Logf("%v to go: %v", time.Until(end).Round(time.Second), samples[len(samples)-1])
		}
	}
	return samples
}

// startLoads returns what ends them.
func (s *soak) startLoads() (stop func()) {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		runLoads(s.loads, over)
	}()
	return func() {
		close(over)
		select {
		case <-ended:
		case <-time.After(2 * patience):
			panic("the load does not end; output of vhostd:\n" + s.daemon.Output())
		}
	}
}

// rest waits until all flows have ended and what is held is no more than want, or, without one, does not change any more. It
// returns what is held then, or when patience is over.
func (s *soak) rest(want holding) (now holding) {
	s.t.Helper()
	const still = 10 // looks
	last, same := holding{}, 0
	for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		now = s.holding()
		if now.files == last.files && now.goroutines == last.goroutines && now.pages == last.pages && now.flows == 0 {
			same++
		} else {
			same = 0
		}
		if last = now; same >= still && (want == holding{} || now.atMost(want)) {
			break
		}
	}
	return now
}

// atMost leaves out resident memory, which garbage is part of.
func (h holding) atMost(want holding) bool {
	return h.files <= want.files && h.goroutines <= want.goroutines && h.pages <= want.pages+pagesSlack && h.attachFiles <= want.attachFiles
}

// pagesSlack are pages that rest in pools in one pause and not in the other one.
const pagesSlack = 64

// residentSlack is what the collector and the allocator's spans come to in a program this small, in KiB.
const residentSlack = 4 << 10

func (s *soak) judge(start, end holding, under []holding) {
	s.t.Helper()
	if end.flows != 0 || start.flows != 0 {
		s.t.Errorf("flows are left: %d at the start, %d at the end", start.flows, end.flows)
	}
	if !end.atMost(start) {
		s.t.Errorf("not flat: %v; was %v", end, start)
	}
	resident := func(h holding) int { return h.resident }
	attach := func(h holding) int { return h.attachResident }
	quarter := len(under) / 4
	for _, part := range []struct {
		what         string
		before, then int
	}{
		{"vhostd at rest", start.resident, end.resident},
		{"vhostd under load", median(under[:quarter], resident), median(under[len(under)-quarter:], resident)},
		{"attach at rest", start.attachResident, end.attachResident},
		{"attach under load", median(under[:quarter], attach), median(under[len(under)-quarter:], attach)},
	} {
		change := 100 * float64(part.then-part.before) / float64(part.before)
		s.t.Logf("%s: %d KiB resident before, %d KiB at the end (%+.1f %%)", part.what, part.before, part.then, change)
		// The race detector never gives back what it keeps of goroutines that are gone.
		if os.Getenv("VHOSTD_RACE") != "1" && part.then > part.before+part.before/20+residentSlack {
			s.t.Errorf("%s: resident memory grows from %d to %d KiB", part.what, part.before, part.then)
		}
	}
}

func median(samples []holding, value func(holding) int) int {
	values := make([]int, len(samples))
	for i, h := range samples {
		values[i] = value(h)
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// holding looks at both processes.
func (s *soak) holding() (h holding) {
	s.t.Helper()
	metrics, err := s.daemon.Metrics()
	if err != nil {
		s.t.Fatalf("%v; output of vhostd:\n%s", err, s.daemon.Output())
	}
	for name, to := range map[string]*int{
		"go_goroutines": &h.goroutines, "vhostd_arena_pages": &h.pages, "vhostd_pool_in_flight": &h.inFlight, "vhostd_user_flows": &h.flows,
	} {
		value, ok := metrics[name]
		if !ok {
			s.t.Fatalf("no metric %s", name)
		}
		*to = int(value)
	}
	h.heap = int(metrics["go_memstats_heap_inuse_bytes"]) >> 10
	h.idle = int(metrics["go_memstats_heap_idle_bytes"]-metrics["go_memstats_heap_released_bytes"]) >> 10
	h.files, _ = processUse(s.t, s.daemon.PID())
	h.resident, h.mapped = residentKiB(s.t, s.daemon.PID())
	h.attachFiles, _ = processUse(s.t, s.guest.PID())
	h.attachResident, _ = residentKiB(s.t, s.guest.PID())
	return h
}

// residentKiB reads the resident memory of a process, and the number of its mappings.
func residentKiB(t *testing.T, pid int) (kib, mappings int) {
	t.Helper()
	folder := filepath.Join("/proc", fmt.Sprint(pid))
	statm, err := os.ReadFile(filepath.Join(folder, "statm"))
	if err != nil {
		t.Fatal(err)
	}
	var size, pages int
	if _, err := fmt.Sscan(string(statm), &size, &pages); err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile(filepath.Join(folder, "maps"))
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize() / 1024, strings.Count(string(maps), "\n")
}

// twin is another thread in a namespace, until the test ends.
func twin(t *testing.T, ns *rig.Namespace) *rig.Namespace {
	t.Helper()
	other, err := ns.Twin()
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	t.Cleanup(other.Close)
	return other
}
