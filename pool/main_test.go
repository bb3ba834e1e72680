package pool

import (
	"os"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/pagemem"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines()))
}

const (
	me    = pagemem.OwnerID(1)
	other = pagemem.OwnerID(2)
)

// newArena makes an arena that must be empty at the end of the test.
func newArena(t testing.TB, pages, reserve int) *pagemem.Arena {
	t.Helper()
	a, err := pagemem.NewArena(pagemem.Config{Bytes: uint64(pages+reserve) * pagemem.PageSize, ReservePages: reserve})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if s := a.Stats(); s.Misuse != 0 && !t.Failed() {
			t.Errorf("arena counted misuse: %+v", s)
		}
		if err := a.Close(); err != nil && !t.Failed() {
			t.Error(err)
		}
	})
	return a
}

// newPool makes a pool that is destroyed, and waited for, at the end of the test.
func newPool(t testing.TB, cfg Config) *Pool {
	t.Helper()
	if cfg.Owner == 0 {
		cfg.Owner = me
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Destroy()
		select {
		case <-p.Done():
		case <-time.After(5 * time.Second):
			t.Errorf("destroyed pool still waits for %d pages", p.InFlight())
		}
	})
	return p
}
