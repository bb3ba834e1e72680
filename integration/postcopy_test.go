package integration

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

// TestPostcopyMigration moves a guest in the middle of its streams to a QEMU that has none of its memory: it runs there, with rings and
// buffers that arrive when vhostd or the guest misses them, and the streams go on undamaged. The guest rests from before the migration until
// it runs at the destination, because an emulated CPU of QEMU 7.2 loses writes while they are tracked.
func TestPostcopyMigration(t *testing.T) {
	variants := []rig.VMConfig{{}, {Device: "packed=on"}, {Device: "mrg_rxbuf=off"}}
	for _, cfg := range variants[:rounds(1, len(variants))] {
		t.Run(cfg.Device, func(t *testing.T) {
			from, to, ns := newSites(t)
			to.offerPostcopy(ns)
			if out := to.daemon.Output(); strings.Contains(out, "postcopy migration is not offered") {
				testmain.Skip(t, "postcopy does not work here:\n%s", out)
			}
			from.vm = from.startVM(t, cfg)
			ends := rig.Ends{NS: ns, VM: from.vm, HostIP: hostIP, GuestIP: guestIP}
			waitBoot(t, ends)
			postcopy(t, ns, from, to, cfg)
			ends.VM = to.vm
			checkPing(t, ends, 56, 1472)
			checkDatagrams(t, ends, 18, 1472)
			to.stopDaemon()
		})
	}
}

// offerPostcopy starts vhostd again.
func (s *site) offerPostcopy(ns *rig.Namespace) {
	s.t.Helper()
	s.stopDaemon()
	var err error
	if s.daemon, err = rig.StartDaemon(ns, s.folder, "tap,name=tapB,bridge="+bridgeName, "--postcopy", "on"); err != nil {
		s.t.Fatal(err)
	}
}

// postcopy moves the guest under load.
func postcopy(t *testing.T, ns *rig.Namespace, from, to *site, cfg rig.VMConfig) {
	t.Helper()
	uri := "unix:" + filepath.Join(to.folder, "migration")
	cfg.Incoming, cfg.Paused = uri, true
	to.vm = to.startVM(t, cfg)
	load := startLoad(t, ns, from.vm)
	execute(t, from.vm, "stop", nil)
	begin := time.Now()
	for _, vm := range []*rig.VM{from.vm, to.vm} {
		execute(t, vm, "migrate-set-capabilities", map[string]any{"capabilities": []map[string]any{{"capability": "postcopy-ram", "state": true}}})
	}
	execute(t, from.vm, "migrate-set-parameters", map[string]any{"max-bandwidth": 4 << 20, "max-postcopy-bandwidth": migrationBandwidth})
	execute(t, from.vm, "migrate", map[string]any{"uri": uri})
	waitMigration(t, from.vm, "active")
	execute(t, from.vm, "migrate-start-postcopy", nil)
	waitMigration(t, from.vm, "postcopy-active")
	if err := to.vm.WaitRunState("paused", slow); err != nil {
		t.Fatal(err)
	}
	to.vm.Agent.Adopt(from.vm.Agent)
	execute(t, to.vm, "cont", nil)
	runs := time.Now()
	load.mustRun(t)
	info := waitMigration(t, from.vm, "completed")
	arrived := time.Now()
	if arrived.Sub(runs) < 500*time.Millisecond {
		t.Errorf("all memory arrived %v after the guest ran: that was no test", arrived.Sub(runs))
	}
	load.finish(t, to.vm, begin.Add(-10*time.Second), arrived.Add(5*time.Second))
	if err := from.vm.Quit(); err != nil {
		t.Errorf("QEMU at the source: %v", err)
	}
	t.Logf("rested %v, ran %v with memory missing; %d MiB came, %d requests for pages", runs.Sub(begin).Round(time.Millisecond),
		arrived.Sub(runs).Round(time.Millisecond), info.RAM.Sent/mebibyte, info.RAM.Requests)
	awaited := regexp.MustCompile(`pages-awaited=([0-9]+)`).FindStringSubmatch(to.daemon.Output())
	if awaited == nil || awaited[1] == "0" {
		t.Errorf("vhostd missed no page:\n%s", to.daemon.Output())
	} else {
		t.Logf("vhostd awaited %s pages", awaited[1])
	}
}

func execute(t *testing.T, vm *rig.VM, command string, args any) {
	t.Helper()
	if err := vm.QMP.Execute(command, args, nil, 10*time.Second); err != nil {
		t.Fatalf("%s: %v", command, err)
	}
}

// migration is what QEMU says of one.
type migration struct {
	Status string `json:"status"`
	Error  string `json:"error-desc"`
	RAM    struct {
		Sent     int64 `json:"transferred"`
		Requests int64 `json:"postcopy-requests"`
	} `json:"ram"`
}

// waitMigration waits for a state of the migration.
func waitMigration(t *testing.T, vm *rig.VM, state string) (m migration) {
	t.Helper()
	for end := time.Now().Add(slow); m.Status != state; time.Sleep(5 * time.Millisecond) {
		if err := vm.QMP.Execute("query-migrate", nil, &m, 10*time.Second); err != nil {
			t.Fatal(err)
		}
		if m.Status == "failed" || time.Now().After(end) {
			t.Fatalf("the migration is not %s: %+v", state, m)
		}
	}
	return m
}
