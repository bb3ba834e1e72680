package main

import (
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"
)

// Descriptors: three eventfds a ring, of which a front-end may use twice as many as are offered; a
// network's queue and what its edge waits with a pair; a few for the guest's sockets and memory regions in passing, and for the process
// itself.
const (
	filesPerPair    = 2*2*3 + 3
	filesPerGuest   = 16
	filesPerProcess = 64
)

// checkFiles warns when the limit of open files is too low for what is configured; the runtime has
// raised the soft limit to the hard one already.
func (p *plan) checkFiles(log *slog.Logger) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return
	}
	need := uint64(filesPerProcess)
	for _, g := range p.guests {
		need += uint64(filesPerGuest + filesPerPair*g.QueuePairs)
	}
	if need > limit.Max {
		log.Warn("the limit of open files is too low for all guests with all queue pairs: raise it (LimitNOFILE=, ulimit -Hn)",
			"limit", limit.Max, "needed", need)
	}
}

// explain adds the remedy to errors whose cause is a limit of the process.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EMFILE):
		return fmt.Errorf("%w: raise the limit of open files of this process (LimitNOFILE=, ulimit -n)", err)
	case errors.Is(err, unix.ENFILE):
		return fmt.Errorf("%w: the whole system has too many files open (sysctl fs.file-max)", err)
	}
	return err
}
