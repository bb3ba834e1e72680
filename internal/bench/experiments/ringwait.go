package experiments

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// ringWaits is how the two threads of a ring wait. Spinning, they never notify each other; sleeping, each side asks for a
// notification before it sleeps, as a guest and a blocking worker do.
type ringWaits struct {
	sleep      bool
	kick, call eventFD
}

func newRingWaits(sleep bool) (*ringWaits, error) {
	w := &ringWaits{sleep: sleep, kick: -1, call: -1}
	if !sleep {
		return w, nil
	}
	for _, fd := range []*eventFD{&w.kick, &w.call} {
		n, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("eventfd: %w", err), w.close())
		}
		*fd = eventFD(n)
	}
	return w, nil
}

func (w *ringWaits) close() error { return errors.Join(w.kick.close(), w.call.close()) }

// shown is called by the driver after n chains were shown to the device.
func (w *ringWaits) shown(q driver.Queue, n int) {
	if w.sleep && n > 0 && q.NeedsKick() {
		w.kick.signal()
	}
}

// reaped is called by the driver when nothing came back and it has no room for more.
func (w *ringWaits) reaped(q driver.Queue) error {
	if !w.sleep || q.EnableCalls() {
		return nil
	}
	err := w.call.wait()
	q.DisableCalls()
	return err
}

// served is called by the device after it has given back n chains.
func (w *ringWaits) served(q virtqueue.Ring, n int) error {
	if !w.sleep {
		return nil
	}
	if n > 0 {
		if q.NeedsCall() {
			w.call.signal()
		}
		return nil
	}
	if q.EnableKicks() {
		return nil
	}
	err := w.kick.wait()
	q.DisableKicks()
	return err
}

// eventFD is a notification; -1 is none.
type eventFD int

// signal cannot fail for want of room: a counter that is full has been signaled.
func (fd eventFD) signal() {
	if fd >= 0 {
		_, _ = unix.Write(int(fd), []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}

// wait returns after a signal, or after a second without one, which ends the wait of a run that was canceled.
func (fd eventFD) wait() error {
	const second = 1000 // milliseconds
	_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, second)
	if err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("wait for a notification: %w", err)
	}
	var count [8]byte
	if _, err := unix.Read(int(fd), count[:]); err != nil && !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("read a notification: %w", err)
	}
	return nil
}

func (fd eventFD) close() error {
	if fd < 0 {
		return nil
	}
	return unix.Close(int(fd))
}
