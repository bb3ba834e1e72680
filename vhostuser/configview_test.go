package vhostuser

import (
	"errors"
	"testing"
)

// spaceDevice has a configuration space and nothing else.
type spaceDevice struct {
	Device
	space string
}

func (d *spaceDevice) Config() []byte { return []byte(d.space) }

// TestConfigFrozenWhileSuspended: what was read stays until a ring runs; then the
// front-end is told, once, if something has changed.
func TestConfigFrozenWhileSuspended(t *testing.T) {
	d := &spaceDevice{space: "up"}
	told := 0
	v := configView{dev: d, tell: func() { told++ }}
	check := func(when, want string, tells int) {
		t.Helper()
		if got := string(v.read()); got != want {
			t.Errorf("%s: read %q, want %q", when, got, want)
		}
		if told != tells {
			t.Errorf("%s: told %d times, want %d", when, told, tells)
		}
	}
	v.look()
	d.space = "down"
	check("never read before", "down", 0)
	d.space = "up"
	v.look()
	check("suspended", "down", 0)
	v.setRunning(true)
	check("started", "up", 1)
	v.look()
	check("unchanged", "up", 1)
	d.space = "down"
	v.look()
	v.look()
	check("changed", "down", 2)
	v.setRunning(false)
	d.space = "up"
	v.look()
	check("suspended again", "down", 2)
	d.space = "down"
	v.setRunning(true)
	check("back before the start", "down", 2)
	if err := v.changing(func() error { d.space = "mine"; return nil }); err != nil {
		t.Fatal(err)
	}
	check("the front-end's own change", "mine", 2)
	refused := errors.New("refused")
	if err := v.changing(func() error { return refused }); !errors.Is(err, refused) {
		t.Errorf("refused change: %v", err)
	}
	v.setTell(nil)
	d.space = "up"
	v.look()
	check("nobody to tell", "up", 2)
}
