package worker

import "sync/atomic"

// Stats are a loop's own figures.
type Stats struct {
	Sleeps uint64 // times the thread went to sleep
	Faults uint64 // memory faults charged to a guest
	Stuck  uint64 // call descriptors that had to be unblocked
}

type counters struct {
	sleeps, faults       uint64
	pubSleeps, pubFaults atomic.Uint64
}

func (c *counters) publish() {
	c.pubSleeps.Store(c.sleeps)
	c.pubFaults.Store(c.faults)
}

// Stats returns the figures as of the last time the loop looked at its descriptors.
func (l *Loop) Stats() Stats {
	return Stats{Sleeps: l.stats.pubSleeps.Load(), Faults: l.stats.pubFaults.Load(), Stuck: l.signal.stuck.Load()}
}
