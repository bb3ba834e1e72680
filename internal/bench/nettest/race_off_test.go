//go:build !race

package nettest

// pace divides the frames of a test.
const pace = 1
