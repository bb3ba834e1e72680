package pagemem

import (
	"os"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines()))
}

// newArena makes an arena that must be empty at the end of the test.
func newArena(t testing.TB, chunks, reservePages int) *Arena {
	t.Helper()
	a, err := NewArena(Config{Bytes: uint64(chunks) * ChunkSize, ReservePages: reservePages})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil && !t.Failed() {
			t.Error(err)
		}
	})
	return a
}

// misuse runs f, which breaks a rule of the arena: debug builds panic, others count.
func misuse(t *testing.T, a *Arena, f func()) {
	t.Helper()
	before := a.Stats().Misuse
	defer func() {
		t.Helper()
		if got := recover(); Debug != (got != nil) {
			t.Errorf("recovered %v, debug build: %v", got, Debug)
		}
		if got := a.Stats().Misuse - before; got != 1 {
			t.Errorf("%d misuses counted", got)
		}
	}()
	f()
}
