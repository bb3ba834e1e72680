// Package hostile attacks the real program from one guest's socket and memory and demands that another guest of the same
// worker is served all the time.
package hostile
