package user

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// source is who waits for a descriptor. ready runs on the poller's goroutine and must not wait; events are those of epoll(7).
type source interface {
	ready(events uint32)
}

// poller waits for all descriptors of a port on one goroutine, which the runtime wakes. A connection that is idle so costs no
// goroutine.
type poller struct {
	fd   int
	file *os.File
	raw  syscall.RawConn
	done chan struct{}

	mu      sync.Mutex
	slots   []slot
	free    []uint32
	stopped bool

	buf  []byte    // for datagrams, of the poller's goroutine
	fail func(any) // is told of a panic, after which nobody is waited for
}

// slot is an entry of the table that events name. gen tells a source from a later one in the same place.
type slot struct {
	gen    uint32
	source source
}

// token names a registration.
type token struct {
	index, gen uint32
	valid      bool
}

func newPoller(fail func(any)) (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create epoll descriptor: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("create epoll descriptor: %w", err)
	}
	p := &poller{fd: fd, done: make(chan struct{}), buf: make([]byte, 1<<16), fail: fail}
	p.file = os.NewFile(uintptr(fd), "epoll") // the runtime's poller can watch an epoll descriptor
	if p.raw, err = p.file.SyscallConn(); err != nil {
		p.file.Close()
		return nil, fmt.Errorf("watch epoll descriptor: %w", err)
	}
	go p.loop()
	return p, nil
}

// add watches fd edge-triggered, or level-triggered, until remove.
func (p *poller) add(fd int, events uint32, s source) (token, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return token{}, errors.New("the network is closed")
	}
	var i uint32
	if n := len(p.free); n > 0 {
		i, p.free = p.free[n-1], p.free[:n-1]
	} else {
		i = uint32(len(p.slots))
		p.slots = append(p.slots, slot{})
	}
	at := &p.slots[i]
	at.gen++
	at.source = s
	t := token{index: i, gen: at.gen, valid: true}
	event := unix.EpollEvent{Events: events, Fd: int32(i), Pad: int32(at.gen)}
	if err := unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &event); err != nil {
		at.source = nil
		p.free = append(p.free, i)
		return token{}, fmt.Errorf("watch a socket: %w", err)
	}
	return t, nil
}

// replace has another source told of what happens to a registered descriptor from now on. ready of the one before may be running for the
// last time.
func (p *poller) replace(t token, s source) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := &p.slots[t.index]; at.gen == t.gen && at.source != nil {
		at.source = s
	}
}

// remove ends a registration. The descriptor must still be open. ready may be running for the last time.
func (p *poller) remove(fd int, t token) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.release(t) && !p.stopped {
		_ = unix.EpollCtl(p.fd, unix.EPOLL_CTL_DEL, fd, nil) // closing it has the same effect
	}
}

// forget is remove for a descriptor that the caller closes next, which takes it away from the kernel's list as well.
func (p *poller) forget(t token) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.release(t)
}

// release frees the slot of a registration, if it still is one. The caller holds mu.
func (p *poller) release(t token) bool {
	if !t.valid {
		return false
	}
	at := &p.slots[t.index]
	if at.gen != t.gen || at.source == nil {
		return false
	}
	at.source = nil
	p.free = append(p.free, t.index)
	return true
}

func (p *poller) loop() {
	defer close(p.done)
	defer func() {
		if cause := recover(); cause != nil {
			p.fail(cause)
		}
	}()
	events := make([]unix.EpollEvent, 128)
	sources := make([]source, len(events))
	for {
		n := 0
		err := p.raw.Read(func(fd uintptr) bool {
			var err error
			for n, err = unix.EpollWait(int(fd), events, 0); errors.Is(err, unix.EINTR); {
				n, err = unix.EpollWait(int(fd), events, 0)
			}
			return n != 0
		})
		if err != nil {
			return // closed
		}
		n = max(n, 0)
		p.resolve(events[:n], sources[:n])
		for i, s := range sources[:n] {
			if s != nil {
				s.ready(events[i].Events)
			}
			sources[i] = nil
		}
	}
}

func (p *poller) resolve(events []unix.EpollEvent, sources []source) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range events {
		e := &events[i]
		if at := &p.slots[uint32(e.Fd)]; at.gen == uint32(e.Pad) {
			sources[i] = at.source
		}
	}
}

// close ends the goroutine. Descriptors that are still watched stay their owners'.
func (p *poller) close() {
	p.mu.Lock()
	stopped := p.stopped
	p.stopped = true
	p.mu.Unlock()
	if !stopped {
		_ = p.file.Close() // an epoll descriptor has nothing to fail with
		<-p.done
	}
}
