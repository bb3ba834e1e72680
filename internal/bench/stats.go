package bench

import (
	"math"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
)

// confidence of every interval.
const confidence = 0.95

// Estimate is a mean with its 95 % interval.
type Estimate struct {
	Mean, Low, High float64
	N               int // observations
}

// Noise is half of the interval's width relative to the mean: the smallest difference that could have been told.
func (e Estimate) Noise() float64 {
	switch {
	case e.High == e.Low:
		return 0
	case e.Mean == 0 || math.IsInf(e.High, 0):
		return math.Inf(1)
	}
	return (e.High - e.Low) / 2 / math.Abs(e.Mean)
}

// MeanOf estimates the mean of independent observations (Student's t). With fewer than two the interval is infinite.
func MeanOf(values []float64) Estimate {
	n := len(values)
	if n == 0 {
		return Estimate{Mean: math.NaN(), Low: math.Inf(-1), High: math.Inf(1)}
	}
	mean, deviation := stat.MeanStdDev(values, nil)
	e := Estimate{Mean: mean, Low: math.Inf(-1), High: math.Inf(1), N: n}
	if n > 1 {
		t := distuv.StudentsT{Mu: 0, Sigma: 1, Nu: float64(n - 1)}.Quantile(1 - (1-confidence)/2)
		half := t * deviation / math.Sqrt(float64(n))
		e.Low, e.High = mean-half, mean+half
	}
	return e
}

// StdErr is the standard error of the mean.
func StdErr(values []float64) float64 {
	if len(values) < 2 {
		return math.NaN()
	}
	return stat.StdErr(stat.StdDev(values, nil), float64(len(values)))
}

// RatioOf estimates the ratio of a's cost to b's from pairs of observations. The logarithms of the pairs' ratios are averaged, so
// that the ratio of b to a is exactly the inverse. All values are positive and the slices equally long.
func RatioOf(a, b []float64) Estimate {
	logs := make([]float64, len(a))
	for i := range a {
		logs[i] = math.Log(a[i] / b[i])
	}
	e := MeanOf(logs)
	return Estimate{Mean: math.Exp(e.Mean), Low: math.Exp(e.Low), High: math.Exp(e.High), N: e.N}
}

// Verdict says what an interval tells about a target.
type Verdict string

// Verdicts.
const (
	Holds      Verdict = "holds"
	Fails      Verdict = "fails"
	Unresolved Verdict = "unresolved" // the interval contains the target
)

// Judge compares an estimate with a target that it is to reach, or with atMost, that it must not exceed. NaN decides nothing.
func Judge(e Estimate, target float64, atMost bool) Verdict {
	low, high := e.Low, e.High
	if atMost {
		low, high, target = -e.High, -e.Low, -target
	}
	switch {
	case low >= target:
		return Holds
	case high < target:
		return Fails
	}
	return Unresolved
}
