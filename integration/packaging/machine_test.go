package packaging

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

// machine is a copy-on-write view of this machine's files, and a systemd that runs on it as process 1, with a network of its own.
type machine struct {
	t      *testing.T
	root   string
	leader int // the process id of its systemd here
}

// newMachine makes the view. What is written goes into memory and is gone at the end.
func newMachine(t *testing.T) *machine {
	t.Helper()
	testmain.NeedTun(t)
	needs(t, "systemd-nspawn:systemd-container", "nsenter:util-linux", "dpkg")
	dir := t.TempDir()
	mount := func(source, target, kind, options string) {
		t.Helper()
		if err := unix.Mount(source, target, kind, 0, options); err != nil {
			testmain.Skip(t, "mount %s on %s: %v", kind, target, err)
		}
		t.Cleanup(func() {
			// The kernel may hold a mount of the namespace that has just ended for a moment.
			eventually(t, "unmount "+target, func() bool { return !errors.Is(unix.Unmount(target, 0), unix.EBUSY) })
		})
	}
	mount("tmpfs", dir, "tmpfs", "mode=0755,size=1g")
	m := &machine{t: t, root: filepath.Join(dir, "root")}
	upper, work := filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	for _, path := range []string{m.root, upper, work} {
		must(t, os.Mkdir(path, 0o755))
	}
	mount("overlay", m.root, "overlay", fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", upper, work))
	// Images of containers have it, so that packages start nothing.
	if err := os.Remove(filepath.Join(m.root, "usr/sbin/policy-rc.d")); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return m
}

// boot starts systemd with nothing but its own basics, without the services of this machine.
func (m *machine) boot() {
	m.t.Helper()
	// Of its own accord systemd-nspawn refuses these to what runs in it, which systemd on a machine does not.
	const also = "--system-call-filter=landlock_create_ruleset landlock_add_rule landlock_restrict_self mbind"
	p, err := rig.Start(nil, "systemd-nspawn", also, "--quiet", "--register=no", "--keep-unit", "--directory="+m.root, "--private-network",
		"--machine=vhostd-test-"+strconv.Itoa(os.Getpid()), "--boot", "systemd.unit=sysinit.target", "systemd.log_color=no",
		"systemd.setenv=VHOSTD_SANDBOX_TRAP=1")
	must(m.t, err)
	m.t.Cleanup(func() {
		// Process 1 of a container ends at once when it is killed, and all others with it.
		if m.leader != 0 {
			_ = unix.Kill(m.leader, unix.SIGKILL)
		}
		_ = p.Stop(patience)
		if m.t.Failed() {
			m.t.Logf("systemd:\n%s", p.Output())
		}
	})
	children := fmt.Sprintf("/proc/%d/task/%[1]d/children", p.PID())
	eventually(m.t, "systemd runs", func() bool {
		text, err := os.ReadFile(children)
		if err != nil {
			testmain.Skip(m.t, "systemd-nspawn ended:\n%s", p.Output())
		}
		m.leader, _ = strconv.Atoi(strings.TrimSpace(string(text)))
		if m.leader == 0 {
			return false
		}
		out, _ := m.try("systemctl", "is-active", "sysinit.target")
		return out == "active\n"
	})
}

// command runs in the machine.
func (m *machine) command(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--target", strconv.Itoa(m.leader), "--mount", "--uts", "--ipc", "--net", "--pid",
		"--cgroup", "--root", "--wd=/", "--", "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive"}, args...)...)
}

// try returns what the command printed, on both outputs.
func (m *machine) try(args ...string) (string, error) {
	var out bytes.Buffer
	cmd := m.command(args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// run is try for a command that must succeed; the journal says why it did not.
func (m *machine) run(args ...string) string {
	m.t.Helper()
	out, err := m.try(args...)
	if err != nil {
		m.t.Fatalf("%s: %v\n%s\n%s", strings.Join(args, " "), err, out, m.journal("vhostd*"))
	}
	return out
}

// journal returns the lines of the units.
func (m *machine) journal(units string) string {
	out, _ := m.try("journalctl", "--no-pager", "--output=cat", "--unit="+units)
	return out
}

// property is one of a unit, as systemctl show prints it.
func (m *machine) property(unit, name string) string {
	m.t.Helper()
	return strings.TrimSpace(m.run("systemctl", "show", "--value", "--property="+name, unit))
}

// write puts a file into the machine, path is absolute.
func (m *machine) write(path, text string) {
	m.t.Helper()
	cmd := m.command("sh", "-c", `cat >"$1"`, "write", path)
	cmd.Stdin = strings.NewReader(text)
	outputOf(m.t, cmd)
}

// path is where a file of the machine can be reached from here, those on its own file systems included.
func (m *machine) path(inside string) string {
	return fmt.Sprintf("/proc/%d/root%s", m.leader, inside)
}

// has says whether there is such a file in the machine, links included.
func (m *machine) has(path string) bool {
	_, err := m.try("sh", "-c", `[ -e "$1" ] || [ -L "$1" ]`, "has", path)
	return err == nil
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}
