package bench

import (
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

func near(a, b, tolerance float64) bool { return math.Abs(a-b) <= tolerance*max(1, math.Abs(b)) }

// TestMeanOf compares with published values: the quantiles of Student's t are those of any table, the sample is Student's own
// (Biometrika 6, 1908: the difference in hours of sleep), whose interval R's t.test gives as 0.7001142 to 2.4598858.
func TestMeanOf(t *testing.T) {
	sleep := []float64{1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4}
	e := MeanOf(sleep)
	if !near(e.Mean, 1.58, 1e-12) || !near(e.Low, 0.7001142, 1e-6) || !near(e.High, 2.4598858, 1e-6) || e.N != 10 {
		t.Errorf("%+v", e)
	}
	for n, quantile := range map[int]float64{2: 12.7062, 3: 4.3027, 5: 2.7764, 11: 2.2281, 31: 2.0423} {
		values := make([]float64, n)
		for i := range values {
			values[i] = float64(i)
		}
		e := MeanOf(values)
		if got := (e.High - e.Mean) / StdErr(values); !near(got, quantile, 1e-4) {
			t.Errorf("%d values: the interval is %v standard errors, want %v", n, got, quantile)
		}
	}
	if e := MeanOf([]float64{3}); !math.IsInf(e.High, 1) || !math.IsInf(e.Noise(), 1) || Judge(e, 1, false) != Unresolved {
		t.Errorf("one value tells nothing: %+v", e)
	}
	if e := MeanOf(nil); Judge(e, 1, false) != Unresolved {
		t.Errorf("no value tells nothing: %+v", e)
	}
}

func TestRatioOf(t *testing.T) {
	e := RatioOf([]float64{2, 4, 8}, []float64{1, 2, 4})
	if !near(e.Mean, 2, 1e-12) || !near(e.Low, 2, 1e-12) || !near(e.High, 2, 1e-12) {
		t.Errorf("equal ratios: %+v", e)
	}
	rapid.Check(t, func(t *rapid.T) {
		positive := rapid.Float64Range(0.1, 100)
		n := rapid.IntRange(2, 20).Draw(t, "n")
		a := rapid.SliceOfN(positive, n, n).Draw(t, "a")
		b := rapid.SliceOfN(positive, n, n).Draw(t, "b")
		ab, ba := RatioOf(a, b), RatioOf(b, a)
		if !near(ab.Mean, 1/ba.Mean, 1e-9) || !near(ab.Low*ba.High, 1, 1e-9) || !(ab.Low <= ab.Mean && ab.Mean <= ab.High) {
			t.Fatalf("%+v and %+v are not inverse", ab, ba)
		}
	})
}

// TestCoverage: of many intervals about 95 % contain the truth.
func TestCoverage(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	const rounds = 4000
	inside := 0
	for range rounds {
		a, b := make([]float64, 10), make([]float64, 10)
		for i := range a {
			drift := math.Exp(random.NormFloat64())
			a[i], b[i] = 1.1*drift*math.Exp(0.05*random.NormFloat64()), drift*math.Exp(0.05*random.NormFloat64())
		}
		if e := RatioOf(a, b); e.Low <= 1.1 && 1.1 <= e.High {
			inside++
		}
	}
	if share := float64(inside) / rounds; share < 0.94 || share > 0.96 {
		t.Errorf("%.3f of the intervals contain the true ratio", share)
	}
}

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		low, high, target float64
		atMost            bool
		want              Verdict
	}{
		{1.1, 1.3, 1.1, false, Holds}, {1.1, 1.3, 1.2, false, Unresolved}, {1.1, 1.3, 1.3, false, Unresolved}, {1.1, 1.3, 1.31, false, Fails},
		{1.1, 1.3, 1.3, true, Holds}, {1.1, 1.3, 1.2, true, Unresolved}, {1.1, 1.3, 1.09, true, Fails},
	} {
		if got := Judge(Estimate{Low: c.low, High: c.high}, c.target, c.atMost); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}
