package source

import "time"

// burstTime is the time for which unused tokens are kept: long enough for a worker that serves many pairs, short enough not to
// flood a guest that was stopped.
const burstTime = 10 * time.Millisecond

// minSleep bounds how often a fast source wakes its worker.
const minSleep = 50 * time.Microsecond

// bucket is a token bucket, one token a frame.
type bucket struct {
	perNano float64 // tokens a nanosecond
	limit   float64
	tokens  float64
	last    time.Duration
}

func newBucket(rate float64, now time.Duration) bucket {
	return bucket{perNano: rate / float64(time.Second), limit: max(1, rate*burstTime.Seconds()), last: now}
}

// refill adds the tokens due since the last refill and returns how many whole ones there are.
func (b *bucket) refill(now time.Duration) int {
	b.tokens = min(b.limit, b.tokens+float64(now-b.last)*b.perNano)
	b.last = now
	return int(b.tokens)
}

func (b *bucket) take(n int) { b.tokens -= float64(n) }

// wait is the time from the last refill to the next token, at least minSleep.
func (b *bucket) wait() time.Duration {
	return max(minSleep, time.Duration((1-b.tokens)/b.perNano)+1)
}
