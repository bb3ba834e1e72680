package nettest

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// hardware are the counters of the processor that are shown where it and the kernel let them be read.
var hardware = []struct {
	name   string
	config uint64
}{
	{"cycles", unix.PERF_COUNT_HW_CPU_CYCLES}, {"instructions", unix.PERF_COUNT_HW_INSTRUCTIONS},
	{"branch-misses", unix.PERF_COUNT_HW_BRANCH_MISSES}, {"cache-misses", unix.PERF_COUNT_HW_CACHE_MISSES},
}

// perf counts for some threads. It has no counters where there are none to be had.
type perf struct{ fds [][]int }

// openPerf starts to count for the threads, as far as the system allows.
func openPerf(threads []int) *perf {
	p := &perf{fds: make([][]int, len(hardware))}
	for i, h := range hardware {
		for _, tid := range threads {
			attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_HARDWARE, Config: h.config, Size: unix.PERF_ATTR_SIZE_VER0}
			fd, err := unix.PerfEventOpen(&attr, tid, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
			if err != nil {
				p.close()
				return &perf{}
			}
			p.fds[i] = append(p.fds[i], fd)
		}
	}
	return p
}

// read returns the sums; nil if there are none.
func (p *perf) read() map[string]float64 {
	if len(p.fds) == 0 {
		return nil
	}
	sums := map[string]float64{}
	for i, h := range hardware {
		for _, fd := range p.fds[i] {
			var count [8]byte
			if n, err := unix.Read(fd, count[:]); err != nil || n != 8 {
				return nil
			}
			sums[h.name] += float64(binary.NativeEndian.Uint64(count[:]))
		}
	}
	return sums
}

func (p *perf) close() error {
	var errs []error
	for _, list := range p.fds {
		for _, fd := range list {
			errs = append(errs, unix.Close(fd))
		}
	}
	p.fds = nil
	return errors.Join(errs...)
}
