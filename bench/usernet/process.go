package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of times in /proc, 1/USER_HZ.
const tick = 10 * time.Millisecond

// used is the processor time of a process or, with its path below /proc, of a thread: utime and stime, fields 14 and 15 of proc(5).
func used(task string) (total time.Duration, err error) {
	text, err := os.ReadFile(filepath.Join("/proc", task, "stat"))
	if err != nil {
		return 0, err
	}
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	for _, field := range fields[11:13] {
		n, err := strconv.ParseInt(string(field), 10, 64)
		if err != nil {
			return 0, err
		}
		total += time.Duration(n) * tick
	}
	return total, nil
}

// meter tells what processes use between two readings.
type meter struct {
	tasks []string
	at    []time.Duration
}

// begin reads for the first time.
func begin(tasks ...string) (*meter, error) {
	m := &meter{tasks: tasks}
	for _, task := range tasks {
		t, err := used(task)
		if err != nil {
			return nil, err
		}
		m.at = append(m.at, t)
	}
	return m, nil
}

// end gives seconds of each since begin.
func (m *meter) end() (seconds []float64, err error) {
	for i, task := range m.tasks {
		t, err := used(task)
		if err != nil {
			return nil, err
		}
		seconds = append(seconds, (t - m.at[i]).Seconds())
	}
	return seconds, nil
}

func sum(values []float64) (total float64) {
	for _, v := range values {
		total += v
	}
	return total
}

// resident is the memory of a process that is its own, VmRSS less files and shared memory.
func resident(pid string) (bytes float64, err error) {
	text, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			n, err := strconv.ParseFloat(strings.Fields(value)[0], 64)
			return n * 1024, err
		}
	}
	return 0, fmt.Errorf("process %s has no RssAnon", pid)
}

// descriptors is how many a process has open.
func descriptors(pid string) (int, error) {
	list, err := os.ReadDir(filepath.Join("/proc", pid, "fd"))
	return len(list), err
}
