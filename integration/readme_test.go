package integration

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

// readmeSocket is the socket of the README's examples.
const readmeSocket = "/run/vhostd/vm1.sock"

// readmePart returns the first part of the README that the expression matches, with the socket replaced.
func readmePart(t *testing.T, expression, socket string) string {
	t.Helper()
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	part := regexp.MustCompile(expression).FindString(string(text))
	if part == "" || socket != "" && !strings.Contains(part, readmeSocket) {
		t.Fatalf("README.md has nothing like %s with %s", expression, readmeSocket)
	}
	return strings.ReplaceAll(part, readmeSocket, socket)
}

// readmeCommand returns a command of the README as words.
func readmeCommand(t *testing.T, program, socket string) []string {
	t.Helper()
	text := readmePart(t, `(?m)^`+program+` (?:.*\\\n)*.*`, socket)
	return strings.Fields(strings.ReplaceAll(text, "\\\n", " "))
}

// TestReadmeQEMU starts the README's QEMU with the daemon of its quick start, without running the guest.
func TestReadmeQEMU(t *testing.T) {
	e := newEnv(t, 1500)
	words := readmeCommand(t, "qemu-system-x86_64", e.daemon.Socket)
	qmp := filepath.Join(e.folder, "qmp")
	args := append(words[1:], "-S", "-M", "q35", "-display", "none", "-nodefaults", "-qmp", "unix:"+qmp+",server=on,wait=off")
	qemu, err := rig.Start(nil, words[0], args...)
	if err != nil {
		t.Fatal(err)
	}
	defer qemu.Kill()
	q, err := rig.DialQMP(qemu, qmp, 20*time.Second)
	if err != nil {
		t.Fatalf("%v\n%s", err, qemu.Output())
	}
	defer q.Close()
	if err := e.daemon.WaitConnected(true, 5*time.Second); err != nil {
		t.Error(err)
	}
}

// readmeFlags returns the flags that give the socket to QEMU's group.
func readmeFlags(t *testing.T) []string {
	t.Helper()
	return strings.Fields(readmePart(t, `--socket-mode [0-7]+ --socket-owner \w+:\w+`, ""))
}

// TestReadmeLibvirt boots a guest through libvirt, whose QEMU runs as another user, with the README's flags and elements.
func TestReadmeLibvirt(t *testing.T) {
	if _, err := exec.LookPath("virt-qemu-run"); err != nil {
		testmain.Skip(t, "%v: %v", err, rig.ErrNotSetUp)
	}
	e := newEnv(t, 1500, readmeFlags(t)...)
	memory := readmePart(t, `(?s)<memoryBacking>.*?</memoryBacking>`, "")
	network := readmePart(t, `(?s)<interface type='vhostuser'>.*?</interface>`, e.daemon.Socket)
	network = strings.Replace(network, ">", fmt.Sprintf("><mac address='%s'/>", rig.GuestMAC), 1)
	image, err := shared.image()
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	vm, err := rig.StartLibvirt(e.folder, image, memory, network)
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	ends := rig.Ends{NS: e.ns, VM: vm, HostIP: hostIP, GuestIP: guestIP}
	waitBoot(t, ends)
	checkPing(t, ends, 56, 1472)
	checkStreams(t, ends, 4*mebibyte)
	// libvirt's QEMU is no child of the process that was started.
	vm.Close()
	for _, path := range e.qemus(t) {
		t.Errorf("%s is still there after its machine was closed", path)
	}
}

// qemus returns the folders in /proc of the QEMUs that use the environment's folder.
func (e *env) qemus(t *testing.T) (found []string) {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		// Processes end while this looks.
		line, _ := os.ReadFile(path)
		if program, _, _ := bytes.Cut(line, []byte{0}); bytes.Contains(program, []byte("qemu-system")) && bytes.Contains(line, []byte(e.folder)) {
			found = append(found, filepath.Dir(path))
		}
	}
	return found
}

// TestReadmeDPDK runs the README's testpmd against the network that generates frames.
func TestReadmeDPDK(t *testing.T) {
	pages := reservePages(t)
	daemon := startPlain(t, "source")
	defer daemon.Kill()
	words := readmeCommand(t, "dpdk-testpmd", daemon.Socket)
	args := append([]string{"-oL", words[0], "--huge-dir", pages.Folder}, words[1:]...)
	pmd, err := rig.Start(nil, "stdbuf", args...)
	if err != nil {
		t.Fatal(err)
	}
	defer pmd.Kill()
	var packets uint64
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end) && packets < 10000; time.Sleep(100 * time.Millisecond) {
		if stats, err := daemon.Stats(); err == nil {
			packets, _ = stats.Sum(0)
		}
	}
	if packets < 10000 {
		t.Errorf("%d packets within twenty seconds; testpmd:\n%s", packets, pmd.Output())
	}
}
