package integration

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

// TestAttachOrdinaryUser attaches a namespace of a user without any privileges, by the number of a process in it.
func TestAttachOrdinaryUser(t *testing.T) {
	testmain.NeedTun(t)
	for _, program := range []string{"setpriv", "unshare", "nsenter"} {
		if _, err := exec.LookPath(program); err != nil {
			testmain.Skip(t, "%v: %v", err, rig.ErrNotSetUp)
		}
	}
	const nobody = 65534
	folder, err := os.MkdirTemp("", "vhostd-nobody") // the test's folder is root's alone
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	if err := os.Chown(folder, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	program := copyBinary(t, folder)
	asNobody := func(args ...string) *rig.Process {
		t.Helper()
		p, err := rig.Start(nil, "setpriv", append([]string{"--reuid=65534", "--regid=65534", "--clear-groups"}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		return p
	}
	socket := filepath.Join(folder, "s")
	wait := func(p *rig.Process, word string) {
		t.Helper()
		if err := p.WaitOutput(word, 60*time.Second, func(out string) bool { return strings.Contains(out, word) }); err != nil {
			t.Fatal(err)
		}
	}
	serve := asNobody(program, "serve", "--socket", socket, "--network", "user")
	wait(serve, "listening")
	holder := asNobody("unshare", "-Urn", "sh", "-c", "echo entered; exec sleep 600")
	wait(holder, "entered")
	a := asNobody(program, "attach", "--socket", socket, "--netns", fmt.Sprint(holder.PID()), "--dhcp")
	wait(a, "attached eth0 in ")
	routes, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/route", holder.PID()))
	if err != nil || !strings.Contains(string(routes), "eth0\t00000000\t0202000A") {
		t.Errorf("no route through 10.0.2.2: %v\n%s", err, routes)
	}
	if err := a.Stop(20 * time.Second); err != nil {
		t.Errorf("%v; output:\n%s", err, a.Output())
	}
	foreign := asNobody(program, "attach", "--socket", socket, "--netns", fmt.Sprint(os.Getpid()))
	err = foreign.Wait(20 * time.Second)
	out := foreign.Output()
	if err == nil || !strings.Contains(out, "ermission denied") && !strings.Contains(out, "not permitted") {
		t.Errorf("root's namespace: %v\n%s", err, out)
	}
}

func copyBinary(t *testing.T, folder string) string {
	t.Helper()
	binary, err := rig.Binary()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "vhostd")
	if err := os.WriteFile(path, text, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestAttachDPDK attaches a namespace to DPDK's back-end, which returns every frame.
func TestAttachDPDK(t *testing.T) {
	pages := reservePages(t)
	socket := filepath.Join(shared.folder, "attach-dpdk")
	back, err := rig.Start(nil, "dpdk-testpmd", "--lcores", "0@0,1@0", "--no-pci", "--huge-dir", pages.Folder, "--huge-unlink",
		"--file-prefix", "attach", "-m", "256", "--vdev", "net_vhost0,iface="+socket+",queues=1",
		"--", "-i", "--forward-mode=io", "--nb-cores=1", "--auto-start", "--total-num-mbufs=4096")
	if err != nil {
		t.Fatal(err)
	}
	defer back.Kill()
	started := func(output string) bool { return strings.Contains(output, "testpmd> ") }
	if err := back.WaitOutput("prompt", 30*time.Second, started); err != nil {
		t.Fatal(err)
	}
	for name, flags := range map[string][]string{
		"split": nil, "packed": {"--ring", "packed"}, "few": {"--without", "MRG_RXBUF,EVENT_IDX,CSUM,GUEST_CSUM"},
	} {
		t.Run(name, func(t *testing.T) {
			a := startAttach(t, socket, flags...)
			if err := a.loop(200); err != nil {
				t.Errorf("%v; output:\n%s\n%s", err, a.Output(), tail(back.Output()))
			}
			a.stop()
		})
	}
}

// loop sends frames of all lengths and wants them back unharmed, a few at a time.
func (a *attachment) loop(n int) error {
	const kind = 0x88b5                 // for local experiments (IEEE 802)
	const wire = kind&0xff<<8 | kind>>8 // in network byte order
	fd := -1
	if err := a.ns.Do(func() (err error) {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, wire); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: wire, Ifindex: l.Attrs().Index})
	}); err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20}); err != nil {
		return err
	}
	got := make([]byte, 2048)
	for i := range n {
		frame := bytes.Repeat([]byte{byte(i)}, 60+i*(1514-60)/n)
		copy(frame, []byte{0x52, 0x54, 0, 0x77, 0, 1, 0x52, 0x54, 0, 0x77, 0, 2, kind >> 8, kind & 0xff})
		binary.BigEndian.PutUint32(frame[14:], uint32(i))
		if _, err := unix.Write(fd, frame); err != nil {
			return err
		}
		for {
			size, from, err := unix.Recvfrom(fd, got, 0)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return fmt.Errorf("frame %d: %w", i, err)
			}
			if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
				continue
			}
			if !bytes.Equal(got[:size], frame) {
				return fmt.Errorf("frame %d of %d bytes came back with %d, or damaged", i, len(frame), size)
			}
			break
		}
	}
	return nil
}
