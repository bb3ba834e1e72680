package edge

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// pause joins what wakes a queue's worker: the network's own descriptor and a timer. Both are watched edge-triggered by an epoll
// descriptor, which the worker watches edge-triggered in turn: every event of theirs is an edge of its (ep_poll_callback, fs/eventpoll.c,
// wakes who polls the descriptor whether or not events were collected), so that nobody has to collect any.
type pause struct {
	poll, timer int
}

// newPause does not own the network's descriptor, which may be -1.
func newPause(network int) (*pause, error) {
	p := &pause{poll: -1, timer: -1}
	if err := p.open(network); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *pause) open(network int) (err error) {
	if p.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("create epoll: %w", err)
	}
	if p.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return fmt.Errorf("create timer: %w", err)
	}
	for _, fd := range []int{p.timer, network} {
		if fd < 0 {
			continue
		}
		event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(fd)}
		if err := unix.EpollCtl(p.poll, unix.EPOLL_CTL_ADD, fd, &event); err != nil {
			return fmt.Errorf("watch descriptor %d: %w", fd, err)
		}
	}
	return nil
}

// set makes the descriptor ready after d. False says that the timer cannot be set.
func (p *pause) set(d time.Duration) bool {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(d, 1)))}
	return unix.TimerfdSettime(p.timer, 0, &spec, nil) == nil
}

func (p *pause) close() {
	for _, fd := range []int{p.poll, p.timer} {
		if fd >= 0 {
			_ = unix.Close(fd) // neither has anything to fail with
		}
	}
}
