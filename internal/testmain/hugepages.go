package testmain

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// Hugepages makes sure that n more pages of 2 MiB exist until the test ends. Where it may not or memory is short, the test is skipped.
func Hugepages(t testing.TB, n int) {
	t.Helper()
	const count = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
	before, err := readNumber(count)
	if err != nil {
		Skip(t, "hugepages: %v", err)
	}
	if err := os.WriteFile(count, []byte(strconv.Itoa(before+n)), 0); err != nil {
		Skip(t, "reserve %d hugepages: %v", n, err)
	}
	t.Cleanup(func() {
		if now, err := readNumber(count); err == nil {
			// Other tests may reserve pages at the same time, so this takes back what it gave and no more.
			_ = os.WriteFile(count, []byte(strconv.Itoa(max(now-n, 0))), 0)
		}
	})
	if now, err := readNumber(count); err != nil || now < before+n {
		Skip(t, "reserve %d hugepages: the kernel has %d after %d (%v); memory is short or fragmented", n, now, before, err)
	}
}

func readNumber(path string) (int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}
