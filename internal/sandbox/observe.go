package sandbox

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Observe tells what holds the process by the kernel's word, without a sandbox of ours. Landlock does not show.
func Observe() State {
	s := State{Mode: Off, Capabilities: []string{}}
	if dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0); err == nil {
		s.Dumpable = dumpable == 1
	}
	t, err := readThread("/proc/self/status")
	if err != nil {
		s.Missing = append(s.Missing, err.Error())
		return s
	}
	s.Seccomp, s.NoNewPrivs, s.Capabilities = t.seccomp, t.noNewPrivs, capabilityNames(t.permitted)
	return s
}

// thread is what the kernel tells about a thread.
type thread struct {
	seccomp, noNewPrivs           bool
	permitted, effective, ambient uint64
}

func readThread(file string) (t thread, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return t, err
	}
	for line := range bytes.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(string(line)), ":\t")
		switch key {
		case "Seccomp":
			t.seccomp = value == "2"
		case "NoNewPrivs":
			t.noNewPrivs = value == "1"
		case "CapPrm":
			t.permitted, err = strconv.ParseUint(value, 16, 64)
		case "CapEff":
			t.effective, err = strconv.ParseUint(value, 16, 64)
		case "CapAmb":
			t.ambient, err = strconv.ParseUint(value, 16, 64)
		}
		if err != nil {
			return t, fmt.Errorf("%s: %s: %w", file, key, err)
		}
	}
	return t, nil
}

// verify looks at every thread of the process: a filter that could not be set on all of them is no error of seccomp(2) but a return
// value that nobody hands on.
func verify(filtered bool, capabilities uint64) error {
	files, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(files) == 0 {
		return fmt.Errorf("the threads cannot be listed (%v): is /proc mounted?", err)
	}
	for _, file := range files {
		t, err := readThread(file)
		switch {
		case os.IsNotExist(err) || err != nil && strings.Contains(err.Error(), unix.ESRCH.Error()):
			continue // it ended
		case err != nil:
			return fmt.Errorf("what is in force cannot be told: %w", err)
		case filtered && !t.seccomp:
			return fmt.Errorf("%s: the filter of system calls is not in force on this thread", file)
		case !t.noNewPrivs:
			return fmt.Errorf("%s: no_new_privs is not set on this thread", file)
		case t.permitted != capabilities || t.effective != capabilities || t.ambient != 0:
			return fmt.Errorf("%s: this thread has the capabilities %#x, %#x and %#x (ambient), want %#x", file, t.permitted, t.effective, t.ambient, capabilities)
		}
	}
	return nil
}
