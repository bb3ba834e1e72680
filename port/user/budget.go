package user

import (
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// reserveFDs is how many descriptors of the process's limit flows leave to everything else, at most half of the limit.
const reserveFDs = 256

// descriptors bounds the host sockets of all networks of the process. A network may hold as much as is free, so that one that takes all
// it can get leaves half, a second one half of the rest, and there is always room for those that want few (dynamic thresholds, Choudhury
// and Hahne 1998).
var descriptors = budget{limit: sync.OnceValue(descriptorLimit)}

type budget struct {
	limit func() int64
	held  atomic.Int64
}

func descriptorLimit() int64 {
	var r unix.Rlimit
	if err := unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &r); err != nil {
		return reserveFDs
	}
	limit := int64(min(r.Cur, 1<<30))
	return limit - min(reserveFDs, limit/2)
}

// share is what one network holds of the budget.
type share struct {
	budget *budget
	held   atomic.Int64
}

// take counts one more, or says that there is none.
func (s *share) take() bool {
	mine, all := s.held.Add(1), s.budget.held.Add(1)
	if s.budget.limit()-all < mine-1 && mine > 1 {
		s.give()
		return false
	}
	return true
}

func (s *share) give() {
	s.held.Add(-1)
	s.budget.held.Add(-1)
}

// fdError says that a socket cannot be had now, for a reason that other flows are.
type fdError struct{ err error }

func (e fdError) Error() string { return fmt.Sprintf("no descriptor for a flow: %v", e.err) }
func (e fdError) Unwrap() error { return e.err }
