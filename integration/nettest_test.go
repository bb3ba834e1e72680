package integration

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/bench/nettest"
	"github.com/vhostd/vhostd/internal/testmain"
)

// TestNetTestDPDK drives DPDK's own back-end with the throughput run, which checks every byte that testpmd returns, as it is and with the
// addresses exchanged.
func TestNetTestDPDK(t *testing.T) {
	testmain.NeedRoot(t)
	if _, err := exec.LookPath("dpdk-testpmd"); err != nil {
		testmain.Skip(t, "%v: %v", err, rig.ErrNotSetUp)
	}
	folder := t.TempDir()
	pages, err := rig.ReserveHugepages(folder, testpmdPages)
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	defer func() {
		if err := pages.Close(); err != nil {
			t.Error(err)
		}
	}()
	for _, mode := range []string{"io", "macswap"} {
		t.Run(mode, func(t *testing.T) {
			socket := filepath.Join(folder, mode)
			back, err := rig.Start(nil, "dpdk-testpmd", "--lcores", "0@0,1@0", "--no-pci", "--huge-dir", pages.Folder, "--huge-unlink", "--file-prefix", mode,
				"-m", "256", "--vdev", "net_vhost0,iface="+socket+",queues=1", "--", "-i", "--forward-mode="+mode, "--nb-cores=1", "--auto-start", "--total-num-mbufs=4096")
			if err != nil {
				t.Fatal(err)
			}
			defer back.Kill()
			if err := back.WaitOutput("prompt", 30*time.Second, func(output string) bool { return strings.Contains(output, "testpmd> ") }); err != nil {
				t.Fatal(err)
			}
			for _, ring := range []string{"split", "packed"} {
				for _, depth := range []int{1, 32} {
					o := nettest.Defaults()
					o.Socket, o.Ring, o.Depth, o.N, o.Wake = socket, ring, depth, 1<<13, "adaptive"
					m, err := nettest.Run(context.Background(), o, nil)
					if err != nil {
						t.Fatalf("%s, depth %d: %v\n%s", ring, depth, err, tail(back.Output()))
					}
					t.Logf("%s, depth %d: %v a frame", ring, depth, m.Elapsed/time.Duration(m.Frames))
				}
			}
		})
	}
}

// tail is the end of an output.
func tail(s string) string { return s[max(0, len(s)-2000):] }
