//go:build !race && !vhostd_debug

package pagemem

// Debug is set in builds with the race detector or the tag vhostd_debug.
// Misuse then panics, and freed pages are poisoned.
const Debug = false
