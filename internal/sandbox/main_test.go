package sandbox

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
)

// A sandbox cannot be left, so that each test runs a role in a process of its own: this program again, with the role's name.
const roleVariable, optionsVariable = "SANDBOX_ROLE", "SANDBOX_OPTIONS"

// roles take the options of the test and print lines, "NAME RESULT".
var roles = map[string]func(o Options){}

func TestMain(m *testing.M) {
	if role := roles[os.Getenv(roleVariable)]; role != nil {
		var o Options
		if err := json.Unmarshal([]byte(os.Getenv(optionsVariable)), &o); err != nil {
			panic(err)
		}
		role(o)
		os.Exit(0)
	}
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines()))
}

// say prints a result of a role.
func say(name string, err error) {
	result := "ok"
	if err != nil {
		result = err.Error()
	}
	fmt.Println(name, strings.ReplaceAll(result, "\n", " "))
}

// role is a process that plays one.
type role struct {
	cmd   *exec.Cmd
	out   *bufio.Scanner
	stdin *os.File
}

func startRole(t testing.TB, name string, o Options, attr *syscall.SysProcAttr) *role {
	t.Helper()
	options, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	r := &role{cmd: exec.Command("/proc/self/exe")}
	r.cmd.Env = append(os.Environ(), roleVariable+"="+name, optionsVariable+"="+string(options))
	r.cmd.SysProcAttr = attr
	stdin, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, stdout, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.cmd.Stdin, r.cmd.Stdout, r.cmd.Stderr = stdin, stdout, stdout
	r.stdin, r.out = w, bufio.NewScanner(out)
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stdin.Close()
	stdout.Close()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait()
		w.Close()
		out.Close()
	})
	return r
}

// results of the role until its end, by name.
func (r *role) results(t testing.TB) map[string]string {
	t.Helper()
	m := map[string]string{}
	for r.out.Scan() {
		name, result, _ := strings.Cut(r.out.Text(), " ")
		m[name] += result
	}
	return m
}

// play runs a role to its end.
func play(t testing.TB, name string, o Options, attr *syscall.SysProcAttr) map[string]string {
	t.Helper()
	return startRole(t, name, o, attr).results(t)
}

// nobody runs a role without privileges.
var nobody = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}

// needRoot skips what is only a proof when root is confined.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		testmain.Skip(t, "needs root, to confine it")
	}
}

// needLandlock skips where the kernel has none.
func needLandlock(t testing.TB) {
	t.Helper()
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION); errno != 0 {
		testmain.Skip(t, "landlock: %v", errno)
	}
}

// want compares the results of a role.
func want(t testing.TB, got, want map[string]string) {
	t.Helper()
	for name, result := range want {
		if !strings.Contains(got[name], result) || got[name] == "" {
			t.Errorf("%s: %q, want %q", name, got[name], result)
		}
	}
	if t.Failed() {
		t.Logf("all results: %.1000q", fmt.Sprint(got))
	}
}
