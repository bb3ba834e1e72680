package uffd

import (
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// helperName is what the helper process finds as its name, instead of the program's.
const helperName = "vhostd-postcopy"

// helperSocket is its end of the socket pair.
const helperSocket = 3

// RunHelper turns the process into a helper or a launcher if it was started as one, and then does not return.
// A program that starts them calls it first thing in main.
func RunHelper() {
	prepared.Store(true)
	if len(os.Args) != 1 {
		return
	}
	var err error
	switch os.Args[0] {
	case helperName:
		debug.SetGCPercent(-1) // it lives for one migration
		err = serve(helperSocket)
	case launcherName:
		unix.CloseOnExec(helperSocket)
		err = launchHelpers(helperSocket)
	default:
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, os.Args[0]+":", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// prepared says that RunHelper was called: a program that does not would do its usual work once more instead of the
// helper's.
var prepared atomic.Bool

// child is the helper process.
type child struct {
	sock, uffd int

	mu      sync.Mutex
	regions map[uint32]*childRegion
}

type childRegion struct {
	mapping
	file int // to ask which pages are there, -1 if that is not possible
	base int64
	busy sync.WaitGroup
}

// serve does what the serving process asks for until that ends or closes the socket.
func serve(sock int) error {
	fd, err := open()
	confine()
	if err != nil {
		_ = send(sock, 0, message{op: opHello, errno: errnoOf(err)})
		return err
	}
	if err := send(sock, 0, message{op: opHello}, fd); err != nil {
		return err
	}
	c := &child{sock: sock, uffd: fd, regions: make(map[uint32]*childRegion)}
	for {
		m, fds, err := recv(sock)
		if err == errClosed {
			return nil
		}
		if err != nil {
			return err
		}
		if err := c.handle(m, fds); err != nil {
			return err
		}
	}
}

// confine gives up what the process needs no longer: the front-end has power over it from now on. What cannot
// be given up was not there, or the kernel is too old to care.
func confine() {
	dropPrivileges()
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

func (c *child) handle(m message, fds []int) error {
	answer := message{op: m.op, region: m.region, offset: m.offset, value: m.value}
	c.mu.Lock()
	r := c.regions[m.region]
	c.mu.Unlock()
	if m.op != opMap {
		closeAll(fds)
	}
	var err error
	switch {
	case m.op == opMap && r == nil && len(fds) > 0:
		if r, err = newChildRegion(m, fds); err == nil {
			answer.value = uint64(r.addr)
			c.mu.Lock()
			c.regions[m.region] = r
			c.mu.Unlock()
		}
	case r == nil:
		err = unix.EINVAL
	case m.op == opRegister:
		err = register(c.uffd, r.addr, r.length)
	case m.op == opUnmap:
		c.mu.Lock()
		delete(c.regions, m.region)
		c.mu.Unlock()
		go r.close()
	case m.op == opFetch && m.offset < uint64(r.length) && m.value <= uint64(r.length)-m.offset:
		r.busy.Add(1)
		go c.fetch(r, answer) // it may take for ever
		return nil
	default:
		err = unix.EINVAL
	}
	answer.errno = errnoOf(err)
	return send(c.sock, 0, answer)
}

// newChildRegion maps the first of fds; the second, if any, is its file opened once more.
func newChildRegion(m message, fds []int) (r *childRegion, err error) {
	r = &childRegion{file: -1, base: int64(m.offset)}
	r.mapping, err = mapFile(fds[0], r.base, uintptr(m.value))
	_ = unix.Close(fds[0])
	if err != nil {
		closeAll(fds[1:])
		return nil, err
	}
	if len(fds) > 1 {
		r.file = fds[1]
	}
	return r, nil
}

// close waits for the faults of the region, which end when the front-end answers them.
func (r *childRegion) close() {
	r.busy.Wait()
	_ = r.unmap()
	if r.file >= 0 {
		_ = unix.Close(r.file)
	}
}

// fetch brings a page and tells what is there around it.
func (c *child) fetch(r *childRegion, answer message) {
	defer r.busy.Done()
	if err := r.populate(uintptr(answer.offset), uintptr(answer.value)); err != nil {
		answer.errno = errnoOf(err)
	} else {
		answer.chunk = r.present(answer.offset / ChunkBytes)
	}
	if send(c.sock, 0, answer) != nil {
		os.Exit(1) // the serving process is gone
	}
}

// present asks for the pages of one chunk that are in the page cache. Of hugetlbfs nothing can be learned
// this way.
func (r *childRegion) present(chunk uint64) (bits Chunk) {
	if r.file < 0 {
		return bits
	}
	first := r.base + int64(chunk*ChunkBytes)
	for at, end := first, first+ChunkBytes; at < end; {
		data, err := unix.Seek(r.file, at, unix.SEEK_DATA)
		if err != nil || data >= end {
			return bits
		}
		hole, err := unix.Seek(r.file, data, unix.SEEK_HOLE)
		if err != nil {
			return bits
		}
		for page := (data - first + 1<<PageShift - 1) >> PageShift; page < (min(hole, end)-first)>>PageShift; page++ {
			bits[page/64] |= 1 << (page % 64)
		}
		at = hole
	}
	return bits
}
