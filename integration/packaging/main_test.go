package packaging

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
)

// patience is for anything that must happen on a machine that is busy with other tests.
const patience = time.Minute

var folder string

func TestMain(m *testing.M) {
	var err error
	if folder, err = os.MkdirTemp("", "vhostd-packaging"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := testmain.Run(m, testmain.Files())
	os.RemoveAll(folder)
	os.Exit(code)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// needs skips a test without the programs; each name may be followed by the Debian package that has it.
func needs(t testing.TB, programs ...string) {
	t.Helper()
	for _, name := range programs {
		program, pkg, found := strings.Cut(name, ":")
		if !found {
			pkg = program
		}
		if _, err := exec.LookPath(program); err != nil {
			testmain.Skip(t, "needs %s (Debian: apt-get install %s)", program, pkg)
		}
	}
}

// output runs a program and returns what it printed on standard output.
func output(t testing.TB, program string, args ...string) string {
	t.Helper()
	return outputOf(t, exec.Command(program, args...))
}

func outputOf(t testing.TB, cmd *exec.Cmd) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s%s", strings.Join(cmd.Args, " "), err, &stdout, &stderr)
	}
	return stdout.String()
}

// archs are what a test builds: this machine's architecture, in the long form both.
func archs() []string {
	if os.Getenv("VHOSTD_LONG") == "1" {
		return []string{"amd64", "arm64"}
	}
	return []string{runtime.GOARCH}
}

// dist builds in the repository at source.
func dist(source, out string, env ...string) error {
	cmd := exec.Command(filepath.Join(source, "scripts/dist.sh"), append([]string{"-o", out}, archs()...)...)
	cmd.Env = append(os.Environ(), env...)
	if os.Getenv("VHOSTD_LONG") != "1" {
		cmd.Env = append(cmd.Env, "DEB_COMPRESSION=none")
	}
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("dist.sh: %w\n%s", err, text)
	}
	return nil
}

// built is the folder of what dist.sh makes of this repository, or VHOSTD_DIST.
var built = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("VHOSTD_DIST"); path != "" {
		return path, nil
	}
	out := filepath.Join(folder, "dist")
	return out, dist("../..", out)
})

// artifact returns the path of the one file that the pattern matches; @ stands for this machine's architecture.
func artifact(t testing.TB, pattern string) string {
	t.Helper()
	needs(t, "dpkg-deb:dpkg", "go:golang")
	out, err := built()
	must(t, err)
	paths, err := filepath.Glob(filepath.Join(out, strings.ReplaceAll(pattern, "@", runtime.GOARCH)))
	must(t, err)
	if len(paths) != 1 {
		t.Fatalf("%s: %d files, want one", pattern, len(paths))
	}
	return paths[0]
}
