package uffd

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Probe says why postcopy does not work here, nil if it does. It takes a helper through a whole fault the
// first time, and remembers.
var Probe = sync.OnceValue(probe)

func probe() error {
	page := os.Getpagesize()
	if page != 1<<PageShift {
		return fmt.Errorf("pages of %d bytes, %d are supported", page, 1<<PageShift)
	}
	arrivals := make(chan Arrival, 1)
	h, err := Start(func(a Arrival) {
		select {
		case arrivals <- a:
		default:
		}
	})
	if err != nil {
		return err
	}
	defer h.Close()
	memory, err := unix.MemfdCreate("postcopy-probe", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	defer unix.Close(memory)
	if err := unix.Ftruncate(memory, int64(page)); err != nil {
		return os.NewSyscallError("ftruncate", err)
	}
	if _, err = h.Map(0, memory, 0, uintptr(page)); err == nil {
		err = h.Register(0)
	}
	if err == nil {
		err = h.Fetch(0, 0, uint64(page))
	}
	if err != nil {
		return err
	}
	fd := h.TakeFD()
	defer unix.Close(fd)
	if err := answerFault(fd, make([]byte, page)); err != nil {
		return err
	}
	select {
	case a := <-arrivals:
		return a.Err
	case <-time.After(faultTimeout):
		return errors.New("a page that was brought does not arrive")
	}
}

const faultTimeout = 5 * time.Second

// answerFault waits for one fault and answers it with contents, a page.
func answerFault(fd int, contents []byte) error {
	at, err := NextFault(fd, faultTimeout)
	if err != nil {
		return err
	}
	return Place(fd, at, contents)
}
