package nettest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Usage is what a thread, or several, took of the system.
type Usage struct {
	CPU                    float64 // seconds
	Voluntary, Involuntary uint64  // context switches
	Minor, Major           uint64  // page faults
}

func (u Usage) minus(o Usage) Usage {
	return Usage{u.CPU - o.CPU, u.Voluntary - o.Voluntary, u.Involuntary - o.Involuntary, u.Minor - o.Minor, u.Major - o.Major}
}

func (u Usage) plus(o Usage) Usage {
	return Usage{u.CPU + o.CPU, u.Voluntary + o.Voluntary, u.Involuntary + o.Involuntary, u.Minor + o.Minor, u.Major + o.Major}
}

// ownUsage is the calling thread's, which must be locked.
func ownUsage() (Usage, error) {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &r); err != nil {
		return Usage{}, os.NewSyscallError("getrusage", err)
	}
	seconds := func(t unix.Timeval) float64 { return float64(t.Sec) + float64(t.Usec)/1e6 }
	return Usage{CPU: seconds(r.Utime) + seconds(r.Stime), Voluntary: uint64(r.Nvcsw), Involuntary: uint64(r.Nivcsw),
		Minor: uint64(r.Minflt), Major: uint64(r.Majflt)}, nil
}

// threadUsage reads all threads of a process (proc(5)).
func threadUsage(pid int) (map[int]Usage, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(tasks) == 0 {
		return nil, fmt.Errorf("process %d has no threads: %w", pid, os.ErrNotExist)
	}
	all := map[int]Usage{}
	for _, task := range tasks {
		tid, err := strconv.Atoi(filepath.Base(task))
		if err != nil {
			continue
		}
		u, err := taskUsage(task)
		if os.IsNotExist(err) {
			continue // the thread has ended
		}
		if err != nil {
			return nil, err
		}
		all[tid] = u
	}
	return all, nil
}

func taskUsage(task string) (u Usage, err error) {
	status, err := os.ReadFile(task + "/status")
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		n, _ := strconv.ParseUint(strings.TrimSpace(value), 10, 64)
		switch name {
		case "voluntary_ctxt_switches":
			u.Voluntary = n
		case "nonvoluntary_ctxt_switches":
			u.Involuntary = n
		}
	}
	stat, err := os.ReadFile(task + "/stat")
	if err != nil {
		return u, err
	}
	// Behind the name, which may contain anything: fields 10 and 12 count faults.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 13 {
		return u, fmt.Errorf("%s/stat has %d fields", task, len(fields))
	}
	u.Minor, _ = strconv.ParseUint(fields[7], 10, 64)
	u.Major, _ = strconv.ParseUint(fields[9], 10, 64)
	return u, u.readCPU(task, fields)
}

// readCPU prefers the scheduler's nanoseconds to ticks of 10 ms.
func (u *Usage) readCPU(task string, stat []string) error {
	text, err := os.ReadFile(task + "/schedstat")
	if fields := strings.Fields(string(text)); err == nil && len(fields) > 0 {
		ns, err := strconv.ParseUint(fields[0], 10, 64)
		u.CPU = float64(ns) / 1e9
		return err
	}
	user, _ := strconv.ParseUint(stat[11], 10, 64)
	system, _ := strconv.ParseUint(stat[12], 10, 64)
	u.CPU = float64(user+system) / 100 // USER_HZ
	return nil
}

// difference is what the threads took between two looks, and what the busiest of them did, which is the worker. Threads that
// came in between count from zero.
func difference(before, after map[int]Usage) (all, busiest Usage) {
	for tid, u := range after {
		d := u.minus(before[tid])
		all = all.plus(d)
		if d.CPU > busiest.CPU {
			busiest = d
		}
	}
	return all, busiest
}
