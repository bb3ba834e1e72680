package daemon

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestLeasesGo: what is kept over a restart of a guest's network, or of a switch's, goes when the guest is removed, or the last one of the
// switch, and stays when the daemon ends.
func TestLeasesGo(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	r := newRigIn(t, state)
	want := func(when string, names ...string) {
		t.Helper()
		got := map[string]bool{}
		files, err := filepath.Glob(filepath.Join(state, "*leases"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			got[filepath.Base(file)] = true
		}
		for _, name := range names {
			if !got[name] {
				t.Errorf("%s: there is no %s", when, name)
			}
			delete(got, name)
		}
		if len(got) > 0 {
			t.Errorf("%s: left are %v", when, got)
		}
	}
	remove := func(name string) {
		t.Helper()
		if err := r.daemon.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	const onLAN = "switch,name=lan,uplink=user,uplink-dns=off"
	r.add("lan", "user,dns=off") // has the switch's name
	r.add("a", onLAN)
	r.add("b", onLAN)
	want("three guests", "lan.leases", "lan.switch-leases")
	remove("lan")
	remove("a")
	want("one is left on the switch", "lan.switch-leases")
	remove("b")
	want("none is left")
	r.add("a", onLAN)
	r.add("lan", "user,dns=off")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.daemon.Close(ctx); err != nil {
		t.Fatal(err)
	}
	want("the daemon has ended", "lan.leases", "lan.switch-leases")
}
