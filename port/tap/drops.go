package tap

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// reason is why a frame disappeared.
type reason int

const (
	tapDown reason = iota
	tapDeleted
	badHeader
	noBuffers
	tooShort
	tooLong
	writeError
	readError
	noMemory
	staleOffload
	numReasons
)

var reasonNames = [numReasons]string{
	"tap_down", "tap_deleted", "bad_header", "no_buffers", "too_short", "too_long",
	"write_error", "read_error", "no_memory", "stale_offload",
}

// drops counts a queue's lost frames; the worker adds, anybody reads.
type drops [numReasons]atomic.Uint64

func (d *drops) add(r reason) { d[r].Add(1) }

func (d *drops) visit(visit func(reason string, n uint64)) {
	for r := range d {
		visit(reasonNames[r], d[r].Load())
	}
}

// writeReason is what a failed write of a frame counts as (tun_get_user, drivers/net/tun.c).
func writeReason(errno unix.Errno) reason {
	switch {
	case errno == unix.EIO:
		return tapDown
	case gone(errno):
		return tapDeleted
	case errno == unix.EINVAL:
		return badHeader
	case errno == unix.EMSGSIZE, errno == unix.E2BIG:
		return tooLong
	case errno == unix.EAGAIN, errno == unix.ENOBUFS, errno == unix.ENOMEM:
		return noBuffers
	}
	return writeError
}

// logEvery is the least time between two lines about one cause.
const logEvery = 10 * time.Second

// event is a cause of a line in the log.
type event int

const (
	eventDown event = iota
	eventUp
	eventDeleted
	eventIO
	eventNoMemory
	numEvents
)

var eventTexts = [numEvents]struct {
	level slog.Level
	text  string
}{
	eventDown:     {slog.LevelWarn, "tap is down, frames from the guest are dropped until it is up"},
	eventUp:       {slog.LevelInfo, "tap is up again"},
	eventDeleted:  {slog.LevelError, "tap was deleted, the guest has no network until it is removed and added again"},
	eventIO:       {slog.LevelWarn, "tap refuses frames"},
	eventNoMemory: {slog.LevelWarn, "no memory for frames from the tap, they are dropped"},
}

// events writes the log. Workers report; the line is written by a goroutine of its own, because a log can block.
type events struct {
	log     *slog.Logger
	last    [numEvents]atomic.Int64 // when the cause was logged, in nanoseconds since epoch, 0 = never
	writers sync.WaitGroup
}

var epoch = time.Now()

func (e *events) report(name string, what event, err error) {
	now := int64(time.Since(epoch)) + 1
	last := e.last[what].Load()
	if last != 0 && now-last < int64(logEvery) || !e.last[what].CompareAndSwap(last, now) {
		return
	}
	e.writers.Go(func() {
		log := e.log
		if log == nil {
			log = slog.Default()
		}
		args := []any{"tap", name}
		if err != nil {
			args = append(args, "error", err)
		}
		log.Log(context.Background(), eventTexts[what].level, eventTexts[what].text, args...)
	})
}

// wait returns when every line was written.
func (e *events) wait() { e.writers.Wait() }
