package bench

import "time"

// Timed does the same work several times, n units each time, and returns the nanoseconds a unit of the fastest slice: work of a
// few microseconds is only ever disturbed to the worse, and on a busy machine most slices are.
func Timed(slices, n int, work func() error) (nsPerUnit float64, err error) {
	best := time.Duration(0)
	for i := range slices {
		begin := time.Now()
		if err := work(); err != nil {
			return 0, err
		}
		if took := time.Since(begin); i == 0 || took < best {
			best = took
		}
	}
	// A clock that has not moved is no cost of zero.
	return max(float64(best.Nanoseconds()), 1) / float64(n), nil
}
