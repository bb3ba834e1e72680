// Package ratelimit is a token bucket for bytes that takes without waiting and says how long to wait.
//
// It imports nothing of this module, so that every kind of network may use it.
package ratelimit

import (
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Rate is a number of bits per second. A zero Rate is no limit.
type Rate uint64

// Bounds of a rate other than zero.
const (
	MinRate Rate = 8_000
	MaxRate Rate = 1_000_000_000_000
)

var units = []struct {
	name string
	bits Rate
}{{"tbit", 1e12}, {"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}, {"bit", 1}}

// ParseRate reads a number with one of the units bit, kbit, Mbit, Gbit and Tbit, in any case, such as 10Mbit or 2.5Gbit. Units are
// powers of a thousand, as links are sold, and count the bytes of frames from the Ethernet header on.
func ParseRate(text string) (Rate, error) {
	lower := strings.ToLower(text)
	for _, u := range units {
		digits, ok := strings.CutSuffix(lower, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(digits, 64)
		if err != nil || digits == "" || strings.Trim(digits, "0123456789.") != "" {
			break
		}
		if bits := n * float64(u.bits); bits >= float64(MinRate) && bits <= float64(MaxRate) {
			return Rate(bits), nil
		}
		break
	}
	return 0, fmt.Errorf("rate %q is not accepted (accepted: %v to %v, in bit, kbit, Mbit, Gbit or Tbit, such as 10Mbit)", text,
		MinRate, MaxRate)
}

// String writes the rate so that ParseRate reads the same.
func (r Rate) String() string {
	names := []string{"Tbit", "Gbit", "Mbit", "kbit", "bit"}
	for i, u := range units {
		if r >= u.bits && r%u.bits == 0 {
			return strconv.FormatUint(uint64(r/u.bits), 10) + names[i]
		}
	}
	return "0bit"
}

const (
	// DefaultBurst is how much may pass at once after a pause, in time at the rate. A worker that was pushed back offers frames again
	// after 10 ms, up to twice that on a busy machine: a shorter burst would cost throughput, a longer one delays what comes behind.
	DefaultBurst = 50 * time.Millisecond
	// MinBurst is a burst's least number of bytes: one frame of the largest size. Slower links than 10.5 Mbit/s have it.
	MinBurst = 64 << 10
	// tick is the clock's unit in parts of a nanosecond: at 100 Gbit/s a short frame lasts 5 ns.
	tick = 16
)

// Bucket is a token bucket. It keeps one number: the time at which it will be full again. A frame passes as long as the bucket is not
// empty, and may leave it in debt, so that frames larger than the burst pass too and the rate holds in the long run. Nothing
// allocates. All methods are safe for concurrent use, also on a nil Bucket, which is no limit.
type Bucket struct {
	start time.Time
	rate  atomic.Uint64
	full  atomic.Int64 // in ticks since start
}

// New makes a full bucket.
func New(rate Rate) *Bucket {
	b := &Bucket{start: time.Now()}
	b.rate.Store(uint64(rate))
	return b
}

// SetRate changes the rate from now on. What was taken stays taken, at the price of its time.
func (b *Bucket) SetRate(rate Rate) { b.rate.Store(uint64(rate)) }

// Rate is the present rate.
func (b *Bucket) Rate() Rate {
	if b == nil {
		return 0
	}
	return Rate(b.rate.Load())
}

// Now is the bucket's clock, for TakeAt: one reading does for a batch. Without a limit it is not read, and 0; a limit that comes at this
// moment at most pushes one batch back.
func (b *Bucket) Now() time.Duration {
	if b.Rate() == 0 {
		return 0
	}
	return time.Since(b.start)
}

// Take takes n bytes and returns 0, or takes nothing and returns the time until it may be tried again. Taking 0 bytes asks.
func (b *Bucket) Take(n int) time.Duration { return b.TakeAt(b.Now(), n) }

// TakeAt is Take at a time of Now.
func (b *Bucket) TakeAt(now time.Duration, n int) time.Duration {
	rate := b.Rate()
	if rate == 0 {
		return 0
	}
	at := int64(now) * tick
	burst := ticks(rate, MinBurst)
	if least := int64(DefaultBurst) * tick; burst < least {
		burst = least
	}
	cost := ticks(rate, n)
	for {
		full := b.full.Load()
		if wait := full - at - burst; wait >= 0 {
			return time.Duration(wait/tick) + 1
		}
		if b.full.CompareAndSwap(full, max(full, at)+cost) {
			return 0
		}
	}
}

// Charge takes n bytes whether the bucket has them or not, at a time of Now: for who knows only afterwards how much passed.
func (b *Bucket) Charge(now time.Duration, n int) {
	rate := b.Rate()
	if rate == 0 {
		return
	}
	cost := ticks(rate, n)
	for {
		full := b.full.Load()
		if b.full.CompareAndSwap(full, max(full, int64(now)*tick)+cost) {
			return
		}
	}
}

// GiveBack undoes a Take of n bytes that did not pass after all.
func (b *Bucket) GiveBack(n int) {
	if rate := b.Rate(); rate != 0 {
		b.full.Add(-ticks(rate, n))
	}
}

// ticks is the time of n bytes at the rate. It does not overflow for up to 64 MiB.
func ticks(rate Rate, n int) int64 {
	const perByte = 8 * uint64(time.Second) * tick // 2^37
	return int64(uint64(n) * perByte / uint64(rate))
}
