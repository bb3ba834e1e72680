package rig

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// MigrationInfo is what QEMU says of a migration.
type MigrationInfo struct {
	Status   string `json:"status"`
	Error    string `json:"error-desc"`
	Downtime int    `json:"downtime"`   // milliseconds
	Total    int    `json:"total-time"` // milliseconds
	RAM      struct {
		Rounds int   `json:"dirty-sync-count"`
		Sent   int64 `json:"transferred"` // bytes
	} `json:"ram"`
}

// Migrate moves the guest to the QEMU that waits at uri and returns when the source has let go of it. bandwidth is in bytes a
// second: little enough of it makes the migration take several passes over the memory.
func (vm *VM) Migrate(uri string, bandwidth int64, timeout time.Duration) (info MigrationInfo, err error) {
	limits := map[string]any{"max-bandwidth": bandwidth, "downtime-limit": 300}
	if err := vm.QMP.Execute("migrate-set-parameters", limits, nil, callTimeout); err != nil {
		return info, err
	}
	if err := vm.QMP.Execute("migrate", map[string]any{"uri": uri}, nil, callTimeout); err != nil {
		return info, err
	}
	for end := time.Now().Add(timeout); ; time.Sleep(20 * time.Millisecond) {
		if err := vm.QMP.Execute("query-migrate", nil, &info, callTimeout); err != nil {
			return info, err
		}
		switch {
		case info.Status == "completed":
			return info, nil
		case info.Status == "failed" || info.Status == "cancelled":
			return info, fmt.Errorf("migration %s: %s", info.Status, info.Error)
		case time.Now().After(end):
			return info, fmt.Errorf("migration is not over after %v: %+v", timeout, info)
		}
	}
}

// WaitRunState waits until the machine is in the given state (query-status).
func (vm *VM) WaitRunState(state string, timeout time.Duration) error {
	for end := time.Now().Add(timeout); ; time.Sleep(10 * time.Millisecond) {
		var status struct {
			Status string `json:"status"`
		}
		if err := vm.QMP.Execute("query-status", nil, &status, callTimeout); err != nil {
			return err
		}
		if status.Status == state {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("the machine is %s, not %s, after %v", status.Status, state, timeout)
		}
	}
}

// UsedRing is the guest address and the number of entries of ring i's used ring.
func (vm *VM) UsedRing(i int) (gpa, size uint64, err error) {
	var devices []struct {
		Path string `json:"path"`
		Name string `json:"name"`
	}
	if err := vm.QMP.Execute("x-query-virtio", nil, &devices, callTimeout); err != nil {
		return 0, 0, err
	}
	for _, d := range devices {
		if d.Name != "virtio-net" {
			continue
		}
		var status struct {
			Size uint64 `json:"vring-num"`
			Used uint64 `json:"vring-used"`
		}
		err := vm.QMP.Execute("x-query-virtio-queue-status", map[string]any{"path": d.Path, "queue": i}, &status, callTimeout)
		return status.Used, status.Size, err
	}
	return 0, 0, errors.New("the machine has no virtio-net device")
}

// Memory opens the guest's memory, which is a memfd of QEMU's.
func (vm *VM) Memory() (*os.File, error) {
	folder := filepath.Join("/proc", fmt.Sprint(vm.PID()), "fd")
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		path := filepath.Join(folder, e.Name())
		if target, err := os.Readlink(path); err == nil && strings.HasPrefix(target, "/memfd:memory-backend-memfd") {
			return os.OpenFile(path, os.O_RDWR, 0)
		}
	}
	return nil, errors.New("QEMU has no memory-backend-memfd")
}
