//go:build !race

package sandbox

// detectorCalls are none without the race detector.
var detectorCalls []call
