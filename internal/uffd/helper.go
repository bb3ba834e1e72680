package uffd

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// startTimeout bounds the time that a helper takes to come up, and to answer what it can answer at once.
const startTimeout = 10 * time.Second

// Helper is a process that populates one guest's memory. All methods are safe for concurrent use.
type Helper struct {
	sock int
	end  func() // kills and reaps the process
	uffd int
	done chan struct{} // closed once the process was reaped and its last answer taken

	arrived func(Arrival)

	mu      sync.Mutex // of calls, each of which waits for its answer
	answers chan message
	ending  sync.Once
	failure error // valid after done
}

// Arrival says that a page is there, or that it cannot be had.
type Arrival struct {
	Region uint32
	Offset uint64 // of the page, in the mapping
	Size   uint64
	// Chunk is what is known of the Offset/ChunkBytes'th chunk of the mapping, the page itself apart.
	Chunk Chunk
	Err   error
}

var errUnprepared = errors.New("the program does not begin with RunHelper")

// Start starts a helper. arrived is called for every Fetch, from another goroutine; it must not call the Helper.
func Start(arrived func(Arrival)) (*Helper, error) {
	if !prepared.Load() {
		return nil, errUnprepared
	}
	sock, end, err := launch()
	if err != nil {
		return nil, err
	}
	h := &Helper{sock: sock, end: end, uffd: -1, done: make(chan struct{}), answers: make(chan message, 1), arrived: arrived}
	if err := h.hello(); err != nil {
		end()
		_ = unix.Close(sock)
		return nil, err
	}
	go h.read()
	return h, nil
}

// hello takes the userfaultfd.
func (h *Helper) hello() error {
	defer within(h.hangUp)()
	m, fds, err := recv(h.sock)
	if err == nil {
		err = m.err()
	}
	if err == nil && len(fds) != 1 {
		err = errors.New("no descriptor came")
	}
	if err != nil {
		closeAll(fds)
		return fmt.Errorf("userfaultfd of the helper process: %w", err)
	}
	h.uffd = fds[0]
	return nil
}

// TakeFD returns the userfaultfd, which is the caller's from then on; -1 at the second call.
func (h *Helper) TakeFD() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	fd := h.uffd
	h.uffd = -1
	return fd
}

// read takes answers until the process has ended.
func (h *Helper) read() {
	var err error
	for err == nil {
		var m message
		var fds []int
		if m, fds, err = recv(h.sock); err != nil {
			break
		}
		closeAll(fds)
		if m.op == opFetch {
			h.arrived(Arrival{Region: m.region, Offset: m.offset, Size: m.value, Chunk: m.chunk, Err: m.err()})
			continue
		}
		select {
		case h.answers <- m:
		default:
			err = errors.New("an answer that nobody waits for")
		}
	}
	h.end()
	h.failure = err
	close(h.done)
}

// Done is closed when the process has ended; nothing arrives afterwards.
func (h *Helper) Done() <-chan struct{} { return h.done }

// Map has the process map length bytes of the file from offset, both in whole pages of the file, as the
// region of that number. It returns the address there. The descriptor stays the caller's.
func (h *Helper) Map(region uint32, fd int, offset uint64, length uintptr) (addr uint64, err error) {
	fds := []int{fd}
	if again := reopen(fd); again >= 0 {
		defer unix.Close(again)
		fds = append(fds, again)
	}
	m, err := h.call(message{op: opMap, region: region, offset: offset, value: uint64(length)}, fds...)
	return m.value, err
}

// reopen opens a tmpfs file (a memfd is one) once more, because to ask for its pages moves the file offset, which
// the front-end shares. -1 means that this is not possible, which costs speed only.
func reopen(fd int) int {
	var fs unix.Statfs_t
	if unix.Fstatfs(fd, &fs) != nil || fs.Type != unix.TMPFS_MAGIC {
		return -1
	}
	again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1
	}
	return again
}

// Register has the region's faults reported: from now on the front-end has to answer them.
func (h *Helper) Register(region uint32) error {
	_, err := h.call(message{op: opRegister, region: region})
	return err
}

// Unmap forgets a region.
func (h *Helper) Unmap(region uint32) error {
	_, err := h.call(message{op: opUnmap, region: region})
	return err
}

// Fetch has the page of size bytes at offset brought. It does not wait; the Arrival may never come.
func (h *Helper) Fetch(region uint32, offset, size uint64) error {
	return send(h.sock, unix.MSG_DONTWAIT, message{op: opFetch, region: region, offset: offset, value: size})
}

// call sends a request and waits for its answer.
func (h *Helper) call(m message, fds ...int) (answer message, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := send(h.sock, unix.MSG_DONTWAIT, m, fds...); err != nil {
		return answer, fmt.Errorf("helper process: %w", err)
	}
	late := time.NewTimer(startTimeout)
	defer late.Stop()
	select {
	case answer = <-h.answers:
	case <-h.done:
		return answer, fmt.Errorf("the helper process has ended: %w", h.failure)
	case <-late.C:
		h.hangUp()
		return answer, fmt.Errorf("the helper process does not answer within %v", startTimeout)
	}
	if answer.op != m.op || answer.region != m.region {
		h.hangUp()
		return answer, errors.New("the helper process answers something else")
	}
	return answer, answer.err()
}

// hangUp has read end the process.
func (h *Helper) hangUp() { _ = unix.Shutdown(h.sock, unix.SHUT_RDWR) }

// Close ends the process, whatever it waits for, and returns when it is gone. Further calls do nothing.
func (h *Helper) Close() {
	h.ending.Do(func() {
		h.hangUp()
		<-h.done
		if fd := h.TakeFD(); fd >= 0 {
			_ = unix.Close(fd)
		}
		_ = unix.Close(h.sock)
	})
}
