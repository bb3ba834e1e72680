package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/network"
	"github.com/vhostd/vhostd/virtionet"
)

// TestReload: guests come, go and follow; those that the configuration never had are left alone.
func TestReload(t *testing.T) {
	r := newRig(t)
	r.add("old", "null")
	r.add("stays", "user,dns=off")
	r.add("added", "null") // by the control API
	first := []config.GuestSpec{r.spec("stays", "user,dns=off,deny=10.0.0.0/8"), r.spec("new", "echo")}
	first[0].TxAlloc = virtionet.TxFragPool
	got := r.daemon.Reload([]string{"old", "stays", "gone"}, first)
	if !slices.Equal(got.Removed, []string{"old"}) || !slices.Equal(got.Added, []string{"new"}) || len(got.Changed) != 1 ||
		!slices.Equal(got.Changed[0].Keys, []string{"tx-alloc", "network:deny"}) || !got.Complete() || got.Idle() {
		t.Errorf("%+v", got)
	}
	if n, err := r.daemon.UserNetwork(OwnerGuest, "stays"); err != nil || len(n.Policy().Rules) != 1 {
		t.Errorf("%+v, %v", n, err)
	}
	if s := r.daemon.Stats(); len(s.Guests) != 3 || s.Guests[2].TxAlloc != "fragpool" {
		t.Errorf("%+v", s.Guests)
	}
	if _, err := os.Lstat(r.path("old")); err == nil {
		t.Error("the removed guest's socket stays")
	}
	echo(t, r.connect("new"))
	if again := r.daemon.Reload([]string{"stays", "new"}, first); !again.Idle() {
		t.Errorf("the same again: %+v", again)
	}

	frag := virtionet.TxRefPage
	if _, err := r.daemon.Change("stays", config.ChangeSpec{TxAlloc: &frag}); err != nil {
		t.Fatal(err)
	}
	second := []config.GuestSpec{r.spec("stays", "user,dns=off,mtu=1400"), r.spec("new", "null")}
	second[0].TxAlloc, second[0].MTU = virtionet.TxFragPool, 1400
	got = r.daemon.Reload([]string{"stays", "new"}, second)
	if len(got.Pending) != 2 || !slices.Equal(got.Pending[0].Keys, []string{"mtu", "network:mtu"}) ||
		!slices.Equal(got.Pending[1].Keys, []string{"network"}) || len(got.Changed) != 1 || got.Complete() {
		t.Errorf("%+v", got)
	}
	if s := r.daemon.Stats(); s.Guests[2].TxAlloc != "refpage" {
		t.Errorf("what the control API has set is gone: %+v", s.Guests[2])
	}
	if s := r.daemon.Status(); s.Guests[2].Network != "user,dns=off" || s.Guests[1].Network != "echo" {
		t.Errorf("networks: %s, %s", s.Guests[2].Network, s.Guests[1].Network)
	}
}

// TestReloadFailures: what fails for one guest is told and does not keep others from following; what it can have later it gets later.
func TestReloadFailures(t *testing.T) {
	r := newRig(t)
	at := func(name string) string { return fmt.Sprintf("publish=unix:%s:80", filepath.Join(r.dir, name)) }
	r.add("a", "user,dns=off,"+at("x"))
	r.add("b", "user,dns=off,"+at("y"))
	swapped := []config.GuestSpec{r.spec("a", "user,dns=off,"+at("y")), r.spec("b", "user,dns=off,"+at("x"))}
	// What is in force of an attempt that failed goes with the next description, also with the one from before.
	halfway := r.spec("a", "user,dns=off,deny=10.0.0.0/8,"+at("y"))
	if got := r.daemon.Reload([]string{"a", "b"}, []config.GuestSpec{halfway, r.spec("b", "user,dns=off,"+at("y"))}); len(got.Failed) != 1 {
		t.Errorf("%+v", got)
	}
	before := []config.GuestSpec{r.spec("a", "user,dns=off,"+at("x")), r.spec("b", "user,dns=off,"+at("y"))}
	if got := r.daemon.Reload([]string{"a", "b"}, before); !got.Complete() {
		t.Errorf("%+v", got)
	}
	u, _ := network.UserPort(r.daemon.find("a").port)
	if u == nil || len(u.Policy().Rules) != 0 || len(u.Published()) != 1 || filepath.Base(u.Published()[0].Path) != "x" {
		t.Error("a keeps what its description does not say")
	}
	if got := r.daemon.Reload([]string{"a", "b"}, swapped); !got.Complete() || len(got.Changed) != 2 {
		t.Errorf("two guests exchange what they publish: %+v", got)
	}
	bad := r.spec("c", "null")
	bad.Socket = filepath.Join(r.dir, "no", "such")
	got := r.daemon.Reload([]string{"a", "b"}, append(swapped, bad, r.spec("d", "null")))
	if len(got.Failed) != 1 || got.Failed[0].Guest != "c" || !strings.Contains(got.Failed[0].Error, "does not exist") ||
		!slices.Equal(got.Added, []string{"d"}) {
		t.Errorf("%+v", got)
	}
	if err := os.Mkdir(filepath.Dir(bad.Socket), 0o700); err != nil {
		t.Fatal(err)
	}
	got = r.daemon.Reload([]string{"a", "b", "c", "d"}, append(swapped, bad, r.spec("d", "null")))
	if !slices.Equal(got.Added, []string{"c"}) || !got.Complete() {
		t.Errorf("%+v", got)
	}
}
