package rig

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
)

// TestTestpmdWithDPDKsOwnBackend tries the rig itself, without vhostd.
func TestTestpmdWithDPDKsOwnBackend(t *testing.T) {
	testmain.NeedRoot(t)
	if _, err := exec.LookPath("dpdk-testpmd"); err != nil {
		testmain.Skip(t, "%v: %v", err, ErrNotSetUp)
	}
	folder := t.TempDir()
	pages, err := ReserveHugepages(folder, 2*288)
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	defer func() {
		if err := pages.Clear(); err != nil {
			t.Error(err)
		}
		if err := pages.Close(); err != nil {
			t.Error(err)
		}
	}()
	free, err := pages.Free()
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(folder, "sock")
	back, err := Start(nil, "dpdk-testpmd", "--lcores", "0@0,1@0", "--no-pci", "--huge-dir", pages.Folder, "--huge-unlink", "--file-prefix", "back", "-m", "256",
		"--vdev", "net_vhost0,iface="+socket+",queues=1", "--", "-i", "--forward-mode=rxonly", "--nb-cores=1", "--auto-start", "--total-num-mbufs=4096")
	if err != nil {
		t.Fatal(err)
	}
	defer back.Kill()
	if err := back.WaitOutput("prompt", 30*time.Second, func(output string) bool { return strings.Contains(output, prompt) }); err != nil {
		t.Fatal(err)
	}
	front, err := StartTestpmd(pages, TestpmdConfig{Socket: socket, Forward: "txonly", Size: 64, Name: "front"})
	if err != nil {
		t.Fatal(err)
	}
	defer front.Kill()
	for _, command := range []string{"start", "stop"} {
		if _, err := front.Command(command); err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond)
	}
	stats, err := front.Stats()
	if err != nil || stats.Sent == 0 {
		t.Fatalf("%+v %v\n%q", stats, err, front.Output())
	}
	if err := front.Quit(); err != nil {
		t.Fatal(err)
	}
	if err := back.Stop(10 * time.Second); err != nil {
		t.Log(err) // testpmd's exit status after SIGTERM is its own matter
	}
	if err := pages.Clear(); err != nil {
		t.Fatal(err)
	}
	if err := pages.WaitFree(free, time.Second); err != nil {
		t.Error(err)
	}
}
