// Package ratelog keeps a peer from filling the host's disk through the log: it limits the lines
// that one cause may write in a second and says how many it held back.
package ratelog

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

const (
	// Limit is how many lines a cause may write in one Window.
	Limit  = 10
	Window = time.Second
	// maxCauses bounds the memory: messages are constants, but guests come and go. Further
	// causes share one budget.
	maxCauses = 4096
)

// Handler passes records on to another handler, at most Limit in a Window for a cause. A cause is
// the level, the message and the attributes bound with Logger.With, such as the guest's name. When
// lines were held back, the end of the window writes one line with their number. It is safe for
// concurrent use.
type Handler struct {
	next  slog.Handler
	bound string
	state *state
}

type state struct {
	mu     sync.Mutex
	causes map[string]*cause
	closed bool
}

type cause struct {
	passed     int
	suppressed int
	level      slog.Level
	message    string
	next       slog.Handler
	timer      *time.Timer
}

// New returns a Handler in front of next. Close ends its timers.
func New(next slog.Handler) *Handler {
	return &Handler{next: next, state: &state{causes: map[string]*cause{}}}
}

// Enabled implements slog.Handler.
func (h *Handler) Enabled(ctx context.Context, l slog.Level) bool { return h.next.Enabled(ctx, l) }

// WithAttrs implements slog.Handler.
func (h *Handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	var b strings.Builder
	b.WriteString(h.bound)
	for _, a := range attrs {
		b.WriteByte(0)
		b.WriteString(a.String())
	}
	return &Handler{next: h.next.WithAttrs(attrs), bound: b.String(), state: h.state}
}

// WithGroup implements slog.Handler.
func (h *Handler) WithGroup(name string) slog.Handler {
	return &Handler{next: h.next.WithGroup(name), bound: h.bound + "\x00" + name, state: h.state}
}

// Handle implements slog.Handler.
func (h *Handler) Handle(ctx context.Context, r slog.Record) error {
	if !h.state.admit(h, r) {
		return nil
	}
	return h.next.Handle(ctx, r)
}

func (s *state) admit(h *Handler, r slog.Record) bool {
	key := r.Level.String() + "\x00" + r.Message + h.bound
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return true
	}
	c := s.causes[key]
	if c == nil {
		if len(s.causes) >= maxCauses {
			key = ""
			c = s.causes[key]
		}
		if c == nil {
			c = &cause{}
			s.causes[key] = c
			c.timer = time.AfterFunc(Window, func() { s.endWindow(key) })
		}
	}
	if c.passed < Limit {
		c.passed++
		return true
	}
	c.suppressed++
	c.level, c.message, c.next = r.Level, r.Message, h.next
	return false
}

// endWindow reports what was held back. A cause that stayed quiet is forgotten, one that did not
// gets another window, in which the report counts as its first line.
func (s *state) endWindow(key string) {
	s.mu.Lock()
	c := s.causes[key]
	if c == nil || s.closed {
		s.mu.Unlock()
		return
	}
	if c.suppressed == 0 {
		delete(s.causes, key)
		s.mu.Unlock()
		return
	}
	next, summary := c.next, summarize(c)
	c.passed, c.suppressed = 1, 0
	c.timer.Reset(Window)
	s.mu.Unlock()
	_ = next.Handle(context.Background(), summary)
}

func summarize(c *cause) slog.Record {
	r := slog.NewRecord(time.Now(), c.level, "suppressed", 0)
	r.AddAttrs(slog.Int("n", c.suppressed), slog.String("cause", c.message), slog.Duration("within", Window))
	return r
}

// Close reports what is still held back and stops the timers. Records handled afterwards pass
// unlimited.
func (h *Handler) Close() {
	s := h.state
	s.mu.Lock()
	s.closed = true
	causes := s.causes
	s.causes = nil
	s.mu.Unlock()
	for _, c := range causes {
		c.timer.Stop()
		if c.suppressed > 0 {
			_ = c.next.Handle(context.Background(), summarize(c))
		}
	}
}
