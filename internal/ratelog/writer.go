package ratelog

import (
	"bytes"
	"io"
	"sync"
	"time"
)

// Backlog is how many lines a Writer keeps while their reader does not take them.
const Backlog = 1024

// Writer passes lines on from a goroutine of its own, so that nobody who logs waits for a reader of the log that has stalled:
// workers log too. Lines beyond Backlog are lost and counted. It is safe for concurrent use.
type Writer struct {
	next  io.Writer
	ended chan struct{}

	mu     sync.Mutex // guards what follows, and lines against being closed
	lines  chan []byte
	lost   uint64
	report func(lost uint64)
	closed bool
}

// NewWriter starts to pass lines on to next. Close ends it.
func NewWriter(next io.Writer) *Writer {
	w := &Writer{next: next, ended: make(chan struct{}), lines: make(chan []byte, Backlog)}
	go w.pass()
	return w
}

// OnLoss has f called, by the Writer's goroutine, with the number of lines that were lost once the reader takes lines again. f
// may write to the Writer.
func (w *Writer) OnLoss(f func(lost uint64)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report = f
}

// Write takes one line and never waits or fails.
func (w *Writer) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return len(line), nil
	}
	select {
	case w.lines <- bytes.Clone(line):
	default:
		w.lost++
	}
	return len(line), nil
}

func (w *Writer) pass() {
	defer close(w.ended)
	for line := range w.lines {
		_, _ = w.next.Write(line) // nobody could be told
		if len(w.lines) > 0 {
			continue
		}
		w.mu.Lock()
		lost, report := w.lost, w.report
		w.lost = 0
		w.mu.Unlock()
		if lost > 0 && report != nil {
			report(lost)
		}
	}
}

// Close waits until all lines are passed on, but no longer than timeout. Later ones are lost.
func (w *Writer) Close(timeout time.Duration) {
	w.mu.Lock()
	if !w.closed {
		w.closed = true
		close(w.lines)
	}
	w.mu.Unlock()
	select {
	case <-w.ended:
	case <-time.After(timeout):
	}
}
