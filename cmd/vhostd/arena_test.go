package main

import (
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
)

// TestArena: huge pages that were tried in vain are told and frames pass all the same; those that are required end the start, as
// does a node that is none.
func TestArena(t *testing.T) {
	echoes := []string{"serve", "--socket", socketIn(t), "--network", "echo", "--arena-node", "0"}
	p := start(t, append(echoes, "--arena-size", "2GiB", "--arena-hugepages", "try,1G")...)
	p.ready()
	echo(t, connect(t, echoes[2]), 100)
	p.stop()
	if !strings.Contains(p.stderr.String(), "the arena has ordinary pages instead of huge ones") {
		t.Errorf("log:\n%s", p.stderr)
	}
	code, stdout, stderr := run(t, append(echoes, "--arena-size", "64GiB", "--arena-hugepages", "require")...)
	wantError(t, exitFailure, "arena of 32768 huge pages of 2 MiB on node 0, free are ", code, stdout, stderr)
	code, stdout, stderr = run(t, "serve", "--socket", socketIn(t), "--network", "echo", "--arena-node", "1000")
	wantError(t, exitFailure, "memory of NUMA node 1000: invalid argument; nodes with memory are ", code, stdout, stderr)
}

// TestArenaHugePages: frames pass through huge pages, which go back at the end.
func TestArenaHugePages(t *testing.T) {
	testmain.NeedRoot(t)
	testmain.Hugepages(t, 8)
	path := socketIn(t)
	p := start(t, "serve", "--socket", path, "--network", "echo", "--arena-size", "16MiB", "--arena-hugepages", "require,2M", "--arena-node", "0")
	p.ready()
	echo(t, connect(t, path), 100)
	p.stop()
}
