package pagemem

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
)

func node(n int) *int { return &n }

// more is an arena larger than any pool of the machines that tests run on.
const more = 64 << 30

// policy returns the line of /proc/self/numa_maps about the arena.
func policy(t *testing.T, a *Arena) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/numa_maps")
	if err != nil {
		testmain.Skip(t, "memory policies: %v", err)
	}
	start := fmt.Sprintf("%08x ", a.Base())
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, start) {
			return line
		}
	}
	t.Fatalf("no mapping at %s in\n%s", start, text)
	return ""
}

// native skips under the emulator of another architecture (make arm64 runs the short tests), which has neither.
func native(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("not applicable: qemu-user maps no huge pages and knows no memory policies")
	}
}

// TestHugePages: pages of the pool are there when the arena is, on the node that was wanted, and go back with it.
func TestHugePages(t *testing.T) {
	native(t)
	testmain.Hugepages(t, 2)
	for _, tc := range []struct {
		mode HugePages
		node *int
		want string
	}{
		{HugeTry, nil, ` default .*huge .*dirty=2\b`},
		{HugeRequire, nil, ` huge .*dirty=2\b`},
		{HugeRequire, node(0), ` bind:0 .*huge .*dirty=2\b`},
	} {
		a, err := NewArena(Config{Bytes: 2<<20 + 1, HugePages: tc.mode, Node: tc.node})
		if err != nil {
			t.Fatalf("%+v: %v", tc, err)
		}
		if s := a.Stats(); s.HugePageSize != size2M || s.NoHugePages != nil || a.Bytes() != 4<<20 {
			t.Errorf("%+v: %d bytes, %+v", tc, a.Bytes(), s)
		}
		if line := policy(t, a); !regexp.MustCompile(tc.want).MatchString(line) {
			t.Errorf("mapping %s, want %s", line, tc.want)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNoHugePages: what the pool has not is an error or, if it was only tried, ordinary memory and the reason.
func TestNoHugePages(t *testing.T) {
	for _, c := range []Config{{Bytes: more}, {Bytes: more, HugePageSize: size1G}, {Bytes: more, Node: node(0)}} {
		const wanted = `arena of \d+ huge pages of . .iB( on node 0)?, free are \d+ \(.*\): reserve them in /sys/.*/nr_hugepages$` +
			`|the kernel has no huge pages of 1 GiB$`
		c.HugePages = HugeRequire
		if a, err := NewArena(c); err == nil || !regexp.MustCompile(wanted).MatchString(err.Error()) {
			t.Errorf("%+v: %v, error %v", c, a, err)
		}
	}
	m, err := mapArena("vhostd-arena", &Config{Bytes: more, HugePages: HugeTry})
	if err != nil {
		t.Fatal(err)
	}
	if m.page != 0 || m.bytes != more || m.why == nil {
		t.Errorf("%+v", m)
	}
	if err := unmapArena(m.base, m.bytes); err != nil {
		t.Error(err)
	}
}

// TestNode: ordinary memory prefers the node.
func TestNode(t *testing.T) {
	native(t)
	a, err := NewArena(Config{Bytes: 1 << 20, Node: node(0)})
	if err != nil {
		t.Fatal(err)
	}
	if line := policy(t, a); !strings.Contains(line, " prefer:0") {
		t.Errorf("mapping %s", line)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	for _, mode := range []HugePages{HugeOff, HugeTry} {
		_, err := NewArena(Config{Bytes: 1 << 20, HugePages: mode, Node: node(1000)})
		if err == nil || !regexp.MustCompile(`NUMA node 1000: invalid argument; nodes with memory are \d`).MatchString(err.Error()) {
			t.Errorf("node 1000: %v", err)
		}
	}
}
