package nettest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
)

// ownNetwork marks a test process in a network namespace of its own.
const ownNetwork = "NETTEST_NETNS"

// binaryPath names the vhostd that was built for the tests, in the process that TestTap starts too.
const binaryPath = "NETTEST_VHOSTD"

func TestMain(m *testing.M) {
	code := testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:"), testmain.Goroutines())
	if os.Getenv(ownNetwork) == "" {
		if path := os.Getenv(binaryPath); path != "" {
			os.RemoveAll(filepath.Dir(path))
		}
	}
	os.Exit(code)
}

// short are the options of a run that takes a moment.
func short() Options {
	o := Defaults()
	o.N, o.InProcess, o.Depth, o.Wire, o.Wake = 1<<12, true, 64, Reflect, "adaptive"
	return o
}

func mustRun(t *testing.T, o Options) Measurement {
	t.Helper()
	m, err := Run(context.Background(), o, nil)
	if err != nil {
		t.Fatalf("%v: %v", o, err)
	}
	if m.Frames < o.N || m.Elapsed <= 0 {
		t.Errorf("%v: %+v", o, m)
	}
	return m
}

// TestInProcess has the back-end in this process, where the race detector sees both.
func TestInProcess(t *testing.T) {
	for _, wire := range []string{Reflect, Pair, Sock} {
		for _, ring := range []string{"split", "packed"} {
			t.Run(wire+"/"+ring, func(t *testing.T) {
				o := short()
				o.Wire, o.Ring = wire, ring
				mustRun(t, o)
			})
		}
	}
}

// TestKinds are the other options, one or two at a time.
func TestKinds(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"chained":           func(o *Options) { o.Layout = "chained" },
		"indirect":          func(o *Options) { o.Layout = "indirect" },
		"flags":             func(o *Options) { o.EventIdx, o.Wake = false, "block" },
		"delayed":           func(o *Options) { o.Delayed, o.Wake = true, "block" },
		"in order":          func(o *Options) { o.InOrder = true },
		"depth 1":           func(o *Options) { o.Depth, o.Wake, o.N = 1, "block", 512 },
		"depth of the ring": func(o *Options) { o.Depth = o.RingSize },
		"batches":           func(o *Options) { o.Batch = "16" },
		"random batches":    func(o *Options) { o.Batch = "random" },
		"imix":              func(o *Options) { o.Frame = "imix" },
		"shortest":          func(o *Options) { o.Frame = "60" },
		"merged":            func(o *Options) { o.Frame, o.Mrg, o.N = "9000", true, 1024 },
		"longest merged":    func(o *Options) { o.Frame, o.Mrg, o.N, o.Depth = "65535", true, 64, 4 },
		"longest":           func(o *Options) { o.Frame, o.N, o.Depth = "65535", 256, 8 },
		"resets":            func(o *Options) { o.Reset = 100 },
		"small ring":        func(o *Options) { o.RingSize, o.Depth = 8, 8 },
		"odd packed ring":   func(o *Options) { o.RingSize, o.Depth, o.Ring = 37, 37, "packed" },
		"nocache":           func(o *Options) { o.Copy, o.Frame = "always", "1514" },
	} {
		for _, ring := range []string{"split", "packed"} {
			for _, wire := range []string{Reflect, Sock} {
				t.Run(fmt.Sprintf("%s/%s/%s", name, ring, wire), func(t *testing.T) {
					o := short()
					o.Ring, o.Wire = ring, wire
					change(&o)
					o.N = max(o.N/pace, 1)
					if o.Ring == "split" && o.RingSize&(o.RingSize-1) != 0 {
						t.Skip("not applicable: a split ring has a power of two")
					}
					m := mustRun(t, o)
					if o.Reset > 0 && m.Driver.Resets < uint64(o.N/o.Reset/2) {
						t.Errorf("%d resets", m.Driver.Resets)
					}
				})
			}
		}
	}
}

// program builds vhostd when it is needed first.
func program(t *testing.T) string {
	t.Helper()
	if path := os.Getenv(binaryPath); path != "" {
		return path
	}
	dir, err := os.MkdirTemp("", "nettest")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "vhostd")
	cmd := exec.Command("go", "build", "-o", path, "github.com/vhostd/vhostd/cmd/vhostd")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as it is published
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	os.Setenv(binaryPath, path)
	return path
}

// TestProcess has the back-end in a process of its own, with each wire but the tap.
func TestProcess(t *testing.T) {
	binary := program(t)
	for _, wire := range []string{Pair, Sock, Reflect} {
		for _, ring := range []string{"split", "packed"} {
			t.Run(wire+"/"+ring, func(t *testing.T) {
				o := short()
				o.Wire, o.Ring, o.InProcess, o.Program, o.Wake, o.Depth, o.N = wire, ring, false, binary, "block", 8, 1<<11
				m := mustRun(t, o)
				if !m.Own || m.Daemon.CPU <= 0 || m.Batches == 0 {
					t.Errorf("the daemon's usage is missing: %+v", m)
				}
			})
		}
	}
}

// TestTap runs itself again in a network namespace of its own.
func TestTap(t *testing.T) {
	testmain.NeedTun(t)
	binary := program(t)
	if os.Getenv(ownNetwork) == "" {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestTap$", "-test.v")
		cmd.Env = append(os.Environ(), ownNetwork+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("--- PASS: TestTap/packed")) {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	for _, ring := range []string{"split", "packed"} {
		t.Run(ring, func(t *testing.T) {
			o := short()
			o.Wire, o.Ring, o.InProcess, o.Program, o.N, o.Depth = Tap, ring, false, binary, 1<<11, 8
			mustRun(t, o)
			o.Frame, o.N = "9000", 1<<9
			mustRun(t, o)
		})
	}
}

// TestFaultsAreFound lets a back-end do what it must not; the run has to end and to say what it was.
func TestFaultsAreFound(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("enough"))
	if _, err := Run(ctx, short(), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("a run goes on after its context ended: %v", err)
	}
	o := short()
	o.InProcess, o.Socket = false, filepath.Join(t.TempDir(), "nobody")
	begin := time.Now()
	if _, err := Run(context.Background(), o, nil); err == nil || time.Since(begin) > watchdog {
		t.Errorf("nobody listens: %v after %v", err, time.Since(begin))
	}
	o = short()
	o.InProcess, o.Program = false, "/bin/false"
	if _, err := Run(context.Background(), o, nil); err == nil || !strings.Contains(err.Error(), "ended") {
		t.Errorf("a daemon that ends at once: %v", err)
	}
}
