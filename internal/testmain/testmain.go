// Package testmain holds what many test packages need round their tests: leak checks for TestMain and the one way to skip.
//
// A leak check is a function that returns nil as long as nothing has leaked, so a package can pass its own:
//
//	func TestMain(m *testing.M) {
//		os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:"), testmain.Goroutines()))
//	}
package testmain

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// settle bounds the wait for things that go away shortly after the last test returned.
const settle = 5 * time.Second

// Leak reports what has leaked since it was made, nil if nothing has.
type Leak func() error

// Run runs the tests and then every leak check, each until it is satisfied or five seconds have passed.
// It returns the exit status for os.Exit. Checks are skipped when a test failed: a failed test may leave things behind.
func Run(m *testing.M, leaks ...Leak) int {
	// A system call that the sandbox of a vhostd under test refuses is a defect.
	os.Setenv("VHOSTD_SANDBOX_TRAP", "1")
	code := m.Run()
	if code != 0 {
		return code
	}
	for _, leak := range leaks {
		if err := poll(leak); err != nil {
			fmt.Fprintf(os.Stderr, "leak: %v\n", err)
			code = 1
		}
	}
	return code
}

// Check verifies the leak checks at the end of one test.
func Check(t testing.TB, leaks ...Leak) {
	t.Helper()
	t.Cleanup(func() {
		for _, leak := range leaks {
			if err := poll(leak); err != nil {
				t.Errorf("leak: %v", err)
			}
		}
	})
}

func poll(leak Leak) error {
	deadline := time.Now().Add(settle)
	for {
		err := leak()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Files compares the process's open file descriptors with those open when Files was called.
// The runtime's own poller descriptors, opened on first use, are not counted.
func Files() Leak {
	before := openFiles()
	return func() error {
		var left []string
		for fd, target := range openFiles() {
			if _, ok := before[fd]; !ok {
				left = append(left, fd+" -> "+target)
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("%d file descriptors left open: %s", len(left), strings.Join(left, ", "))
		}
		return nil
	}
}

func openFiles() map[string]string {
	const folder = "/proc/self/fd"
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil
	}
	files := make(map[string]string, len(entries))
	for _, entry := range entries {
		target, err := os.Readlink(filepath.Join(folder, entry.Name()))
		if err != nil || runtimeFile(target) {
			continue
		}
		files[entry.Name()] = target
	}
	return files
}

// runtimeFile says whether the Go runtime may have opened the file for itself: one epoll and one eventfd on first use of
// the network poller. A package that makes its own of these checks them with counters of its own.
func runtimeFile(target string) bool {
	return target == "anon_inode:[eventpoll]" || target == "anon_inode:[eventfd]"
}

// Mappings compares the number of memory mappings whose line in /proc/self/maps contains name with the number at the call.
func Mappings(name string) Leak {
	before, _ := countMappings(name)
	return func() error {
		now, lines := countMappings(name)
		if now > before {
			return fmt.Errorf("%d mappings with %q, %d before:\n%s", now, name, before, strings.Join(lines, "\n"))
		}
		return nil
	}
}

func countMappings(name string) (int, []string) {
	file, err := os.Open("/proc/self/maps")
	if err != nil {
		return 0, nil
	}
	defer file.Close()
	var lines []string
	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		if strings.Contains(scanner.Text(), name) {
			lines = append(lines, scanner.Text())
		}
	}
	return len(lines), lines
}

// Goroutines reports goroutines that did not exist when Goroutines was called.
func Goroutines() Leak {
	before := goleak.IgnoreCurrent()
	return func() error { return goleak.Find(before, goleak.IgnoreTopFunction("internal/poll.runtime_pollWait")) }
}
