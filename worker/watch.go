package worker

import (
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Add puts a task under the loop's care; it gets its first turn at once. Loop's
// thread only (call it inside [Loop.Do]).
func (l *Loop) Add(t Task) {
	s := &slot{task: t}
	l.slots = append(l.slots, s)
	l.activate(s)
}

// Remove takes a task out; its watches must have been removed. Loop's thread only.
func (l *Loop) Remove(t Task) {
	for i, s := range l.slots {
		if s.task == t {
			if s.active {
				l.active--
			}
			l.slots = slices.Delete(l.slots, i, i+1)
			return
		}
	}
}

// Activate gives a task a turn although none of its descriptors is ready. Loop's
// thread only.
func (l *Loop) Activate(t Task) {
	if s := l.slotOf(t); s != nil {
		l.activate(s)
	}
}

func (l *Loop) slotOf(t Task) *slot {
	for _, s := range l.slots {
		if s.task == t {
			return s
		}
	}
	return nil
}

// Watch reports readiness of fd to t as event, edge-triggered. The descriptor is
// neither owned nor changed. With drain its counter is read after each event, so that
// it never fills; a peer's descriptor must be an eventfd then. Without drain the
// task reads the descriptor itself or does not care. Loop's thread only.
func (l *Loop) Watch(fd int, t Task, event Event, drain bool) error {
	s := l.slotOf(t)
	if s == nil {
		return fmt.Errorf("watch descriptor %d: its task is not on this worker", fd)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff, Fd: int32(fd)}
	if err := unix.EpollCtl(l.epfd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("watch descriptor %d: %w (an eventfd or a pipe is needed)", fd, err)
	}
	l.watches[fd] = &watch{fd: fd, slot: s, event: event, drain: drain}
	return nil
}

// Unwatch ends the reports of fd; it must precede closing fd, because the file behind
// it may stay open in another process. Loop's thread only.
func (l *Loop) Unwatch(fd int) {
	if _, ok := l.watches[fd]; !ok {
		return
	}
	delete(l.watches, fd)
	_ = unix.EpollCtl(l.epfd, unix.EPOLL_CTL_DEL, fd, nil) // fails only for a descriptor that is closed already
}

// sleepTime is how long the loop may sleep in milliseconds, -1 for ever.
func (l *Loop) sleepTime() int {
	if l.pending.Load() {
		return 0
	}
	var first time.Duration
	for _, s := range l.slots {
		if s.deadline > 0 && (first == 0 || s.deadline < first) {
			first = s.deadline
		}
	}
	if first == 0 {
		return -1
	}
	left := first - now()
	return int(max(0, (left+time.Millisecond-1)/time.Millisecond))
}

// wait collects readiness for at most ms milliseconds and activates the tasks concerned.
func (l *Loop) wait(ms int) {
	if ms != 0 {
		l.stats.sleeps++
	}
	l.stats.publish()
	n, err := l.epollWait(ms)
	if err != nil {
		return // EINTR: the next turn looks again
	}
	for i := range n {
		fd := int(l.events[i].Fd)
		if fd == l.wakefd {
			drain(fd)
			continue
		}
		w := l.watches[fd]
		if w == nil {
			continue
		}
		if w.drain {
			drain(fd)
		}
		l.current = w.slot.task
		w.slot.task.Notify(w.event)
		l.current = nil
		l.activate(w.slot)
	}
	l.expire()
}

func (l *Loop) expire() {
	var t time.Duration
	for _, s := range l.slots {
		if s.deadline == 0 {
			continue
		}
		if t == 0 {
			t = now()
		}
		if s.deadline <= t {
			l.activate(s)
		}
	}
}

// epollWait uses the raw call when it cannot block: that spares the runtime's
// bookkeeping. A blocking raw call would stop garbage collection for as long.
func (l *Loop) epollWait(ms int) (int, error) {
	if ms == 0 {
		return epollPoll(l.epfd, l.events[:])
	}
	return unix.EpollWait(l.epfd, l.events[:], ms)
}
