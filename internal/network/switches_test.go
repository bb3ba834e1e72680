package network

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/worker"
)

func newSwitches(t *testing.T) (*Switches, *porttest.Rig) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	rig := porttest.NewRig(t)
	w, err := worker.New(worker.Options{Name: "w", CPU: -1, Wake: worker.Block, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return NewSwitches(SwitchOptions{Arena: rig.Arena, Workers: []*worker.Loop{w}, Logger: log}), rig
}

func (s *Switches) open(text string) (port.Port, error) {
	n, err := Parse(text)
	if err != nil {
		return nil, err
	}
	return n.Open(Options{QueuePairs: 1, Switches: s})
}

// TestSwitchesShareByName: guests that give the same name are on one switch, which is gone with the last of them.
func TestSwitchesShareByName(t *testing.T) {
	s, _ := newSwitches(t)
	var ports []port.Port
	for _, text := range []string{"switch,name=a", "switch,name=a,ageing=60s,backlog=64", "switch,name=b,mac=52:54:00:00:00:01", "switch,name=a,ageing=60s"} {
		p, err := s.open(text)
		if err != nil {
			t.Fatal(err)
		}
		ports = append(ports, p)
	}
	status := s.Status()
	if len(status) != 2 || status[0].Name != "a" || status[0].Ports != 3 || status[1].Ports != 1 {
		t.Errorf("status %+v", status)
	}
	for text, want := range map[string]string{
		"switch,name=a,ageing=61s":                "ageing=1m1s: another guest says 1m0s",
		"switch,name=b,mac=52:54:00:00:00:01":     "another port's",
		"switch,name=c,uplink=tap,uplink-name=lo": "uplink",
	} {
		if _, err := s.open(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error that contains %q", text, err, want)
		}
	}
	if len(s.Status()) != 2 {
		t.Errorf("a failure left something: %+v", s.Status())
	}
	for _, p := range ports {
		for range 2 {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	if left := s.Status(); len(left) != 0 {
		t.Errorf("left: %+v", left)
	}
}

// TestSwitchUplink: the tap is there as long as the switch, whichever guest described it, and carries frames both ways.
func TestSwitchUplink(t *testing.T) {
	testmain.NeedTun(t)
	s, rig := newSwitches(t)
	const described = "switch,name=lan,uplink=tap,uplink-name=vhdsw%d,uplink-up=off"
	first, err := s.open(described)
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.open("switch,name=lan")
	if err != nil {
		t.Fatal(err)
	}
	third, err := s.open("switch,uplink=tap,uplink-up=off,uplink-name=vhdsw%d,name=lan")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.open("switch,name=lan,uplink=tap,uplink-name=other"); err == nil || !strings.Contains(err.Error(), "another guest says tap,name=vhdsw%d,up=off") {
		t.Errorf("another uplink: %v", err)
	}
	if st := s.Status(); len(st) != 1 || st[0].Ports != 4 || st[0].Uplink != "tap,name=vhdsw%d,up=off" || second.MTU() != 1500 {
		t.Errorf("status %+v, MTU %d", st, second.MTU())
	}
	for _, p := range []port.Port{first, third} {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	q, err := second.OpenQueue(0, port.Resources{Arena: rig.Arena, Owner: pagemem.NewOwnerID()})
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Announce([6]byte{2, 0, 0, 0, 0, 9}); err != nil {
		t.Error(err)
	}
	if !porttest.Eventually(func() bool { return s.Status()[0].Drops["tap_down"] == 1 }) {
		t.Errorf("the frame did not reach the tap: %+v", s.Status())
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	start := time.Now()
	if err := second.Close(); err != nil || time.Since(start) > time.Second {
		t.Errorf("%v after %v", err, time.Since(start))
	}
}
