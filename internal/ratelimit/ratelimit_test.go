package ratelimit

import (
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines()))
}

func TestParseRate(t *testing.T) {
	for text, want := range map[string]Rate{
		"10Mbit": 10e6, "1Gbit": 1e9, "2.5gbit": 25e8, "8kbit": 8000, "8000bit": 8000, "1Tbit": 1e12, "0.1MBIT": 1e5, "100GBit": 1e11,
	} {
		r, err := ParseRate(text)
		if err != nil || r != want {
			t.Errorf("%s: %v, %v", text, r, err)
		}
		if again, err := ParseRate(r.String()); err != nil || again != r {
			t.Errorf("%v became %v (%v)", r, again, err)
		}
	}
	for _, text := range []string{"", "10", "Mbit", "-1Mbit", "+1Mbit", "1e9bit", "NaNbit", "infbit", "0Mbit", "7999bit", "2Tbit",
		"1.2.3Mbit", "10MB", " 1Mbit", "0x10bit"} {
		if r, err := ParseRate(text); err == nil || !strings.Contains(err.Error(), "such as 10Mbit") {
			t.Errorf("%q: %v, %v", text, r, err)
		}
	}
}

func FuzzParseRate(f *testing.F) {
	for _, text := range []string{"10Mbit", "2.5Gbit", "bit", ".bit", "1e5kbit", "99999999999999999999bit"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRate(text)
		if err != nil {
			return
		}
		if again, err := ParseRate(r.String()); r < MinRate || r > MaxRate || err != nil || again != r {
			t.Errorf("%q: %v, then %v (%v)", text, r, again, err)
		}
	})
}

// TestRate offers frames of all sizes all the time, and wants what passes to be the rate and one burst.
func TestRate(t *testing.T) {
	for _, rate := range []Rate{MinRate, 1e6, 10e6, 1e9, 1e11, MaxRate} {
		for _, size := range []int{60, 1514, 65549} {
			b := New(rate)
			const duration = 10 * time.Second
			passed, steps := 0, 0
			for now := time.Duration(0); now < duration && steps < 200_000; steps++ {
				wait := b.TakeAt(now, size)
				if wait == 0 {
					passed += size
				}
				now += wait
			}
			if steps >= 200_000 {
				continue // the burst alone is longer than this test
			}
			burst := max(float64(rate)/8*DefaultBurst.Seconds(), MinBurst)
			want := float64(rate) / 8 * duration.Seconds()
			if got := float64(passed); got < want || got > want+burst+float64(2*size) {
				t.Errorf("%v, frames of %d: %.0f bytes in %v, want %.0f and at most %.0f more", rate, size, got, duration, want, burst)
			}
		}
	}
}

// TestRetry: who tries again only every 20 ms loses nothing of the rate.
func TestRetry(t *testing.T) {
	for _, rate := range []Rate{1e6, 100e6, 10e9} {
		b := New(rate)
		passed := 0
		const duration = 5 * time.Second
		for now := time.Duration(0); now < duration; now += 20 * time.Millisecond {
			for b.TakeAt(now, 1514) == 0 {
				passed += 1514
			}
		}
		if want := float64(rate) / 8 * duration.Seconds(); float64(passed) < want*0.999 {
			t.Errorf("%v: %d bytes, want %.0f", rate, passed, want)
		}
	}
}

// TestModel compares with a bucket that keeps its tokens as a real number.
func TestModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rate := Rate(rapid.Uint64Range(uint64(MinRate), uint64(MaxRate)).Draw(rt, "rate"))
		b := New(rate)
		perSecond := float64(rate) / 8
		burst := max(perSecond*DefaultBurst.Seconds(), MinBurst)
		tokens, now := burst, time.Duration(0)
		for range rapid.IntRange(1, 200).Draw(rt, "steps") {
			n := rapid.IntRange(1, 1<<20).Draw(rt, "bytes")
			if rapid.IntRange(0, 9).Draw(rt, "charge") == 0 {
				b.Charge(now, n)
				tokens -= float64(n)
			}
			wait := b.TakeAt(now, n)
			slack := perSecond*2e-9 + 1e-6*burst
			if wait == 0 {
				if tokens < -slack {
					rt.Fatalf("%d bytes passed with %.0f tokens", n, tokens)
				}
				tokens -= float64(n)
			} else {
				if tokens > slack {
					rt.Fatalf("refused with %.0f tokens", tokens)
				}
				if left := tokens + perSecond*wait.Seconds(); left < -slack || left > slack+perSecond*2e-9 {
					rt.Fatalf("after the wait of %v there will be %.0f tokens", wait, left)
				}
			}
			step := time.Duration(rapid.Int64Range(0, int64(100*time.Millisecond)).Draw(rt, "time"))
			now += step
			tokens = min(tokens+perSecond*step.Seconds(), burst)
		}
	})
}

func TestNilAndChanges(t *testing.T) {
	var none *Bucket
	none.GiveBack(5)
	none.Charge(0, 5)
	if none.Take(1<<30) != 0 || none.Rate() != 0 {
		t.Error("a nil bucket limits")
	}
	b := New(0)
	for range 100 {
		if b.Take(1<<20) != 0 {
			t.Fatal("a rate of zero limits")
		}
	}
	b.SetRate(MinRate)
	for b.TakeAt(0, 1514) == 0 {
	}
	if wait := b.TakeAt(0, 1); wait == 0 || wait > 2*time.Second {
		t.Errorf("at %v a frame waits %v", b.Rate(), wait)
	}
	b.GiveBack(4000)
	if b.TakeAt(0, 1514) != 0 {
		t.Error("what was given back is not there")
	}
}

func TestConcurrentUse(t *testing.T) {
	b := New(8e6) // a byte each microsecond
	var wg sync.WaitGroup
	var passed [4]int
	for i := range passed {
		wg.Go(func() {
			for range 100_000 {
				if b.TakeAt(0, 100) == 0 {
					passed[i]++
				}
			}
		})
	}
	wg.Wait()
	total := (passed[0] + passed[1] + passed[2] + passed[3]) * 100
	if total < MinBurst || total > MinBurst+400 {
		t.Errorf("%d bytes passed at one time", total)
	}
}

func TestTakeAllocatesNothing(t *testing.T) {
	b := New(1e9)
	if n := testing.AllocsPerRun(1000, func() { b.Take(1514) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkTake(b *testing.B) {
	for _, kind := range []string{"passes", "waits", "batch"} {
		b.Run("case="+kind, func(b *testing.B) {
			bucket := New(MaxRate)
			size := 60
			if kind == "waits" {
				bucket, size = New(MinRate), MinBurst
			}
			b.ReportAllocs()
			if kind == "batch" {
				now := bucket.Now()
				for b.Loop() {
					bucket.TakeAt(now, size)
				}
				return
			}
			for b.Loop() {
				bucket.Take(size)
			}
		})
	}
}
