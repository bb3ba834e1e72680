package vhostuser

import "log/slog"

// onceLogger logs the first event of each kind in a session: a peer must not be
// able to fill the log. One goroutine uses it. Kinds are a fixed set of names.
type onceLogger struct {
	logger *slog.Logger
	seen   map[string]bool
}

func (o *onceLogger) log(kind, msg string, args ...any) {
	if o.seen[kind] {
		return
	}
	if o.seen == nil {
		o.seen = make(map[string]bool)
	}
	o.seen[kind] = true
	o.logger.Warn(msg, append(args, "note", "further ones of this kind are not logged")...)
}
