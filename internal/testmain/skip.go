package testmain

import (
	"os"
	"testing"
)

// NoSkip says whether a skipped test counts as a failure: in CI (CI=true), or with VHOSTD_NO_SKIP=1.
func NoSkip() bool {
	return os.Getenv("CI") == "true" || os.Getenv("VHOSTD_NO_SKIP") == "1"
}

// Skip ends a test that cannot run here, saying why. Where NoSkip holds it is a failure instead.
func Skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if NoSkip() {
		t.Fatalf("cannot run, and a skip is a failure here: "+format, args...)
	}
	t.Skipf("SKIPPED: "+format, args...)
}

// NeedRoot skips a test that needs the superuser (namespaces, taps, hugepages).
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "needs root, runs as uid %d", os.Geteuid())
	}
}

// NeedTun skips a test that needs to create tap devices.
func NeedTun(t testing.TB) {
	t.Helper()
	NeedRoot(t)
	file, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		Skip(t, "needs /dev/net/tun: %v", err)
	}
	file.Close()
}

// Long skips a test that only `make test-long` (VHOSTD_LONG=1) runs. This is a choice, not a lack, so it never fails.
func Long(t testing.TB) {
	t.Helper()
	if os.Getenv("VHOSTD_LONG") != "1" {
		t.Skip("long: runs with VHOSTD_LONG=1 (make test-long)")
	}
}
