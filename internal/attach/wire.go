package attach

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Messages between an attachment and its helper are JSON, one a packet of a SOCK_SEQPACKET pair.

// order is what the attachment wants.
type order struct {
	// Create makes the interface; it is the first order, and the answer carries the descriptors.
	Create *interfaceConfig `json:"create,omitempty"`
	// Lease asks for an address by DHCP, anew if there is one.
	Lease bool `json:"lease,omitempty"`
}

// interfaceConfig describes the interface.
type interfaceConfig struct {
	Name      string   `json:"name"`
	Queues    int      `json:"queues"`
	HeaderLen int      `json:"header-len"`
	Offloads  int      `json:"offloads"` // TUN_F_* flags
	MAC       string   `json:"mac"`      // "": the kernel's choice
	MTU       int      `json:"mtu"`      // 0: the kernel's default
	Addresses []string `json:"addresses"`
	Gateways  []string `json:"gateways"`
	Stay      bool     `json:"stay"` // for DHCP
}

// report is what the helper says.
type report struct {
	Error   string `json:"error,omitempty"` // the interface could not be made
	MTU     int    `json:"mtu,omitempty"`   // of the interface that was made
	Lease   string `json:"lease,omitempty"` // an address by DHCP, with its prefix
	Detail  string `json:"detail,omitempty"`
	Warning string `json:"warning,omitempty"`
}

const maxMessage = 64 << 10

// link is one end of the pair. Receive belongs to one goroutine, send to any.
type link struct {
	mu   sync.Mutex
	file *os.File
}

// send sends one message with descriptors, which stay the caller's.
func (l *link) send(message any, fds ...int) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(b) > maxMessage {
		return fmt.Errorf("message of %d bytes to the helper: at most %d", len(b), maxMessage)
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.control(func(fd int) error { return unix.Sendmsg(fd, b, rights, nil, unix.MSG_NOSIGNAL) }, true)
}

// receive waits for one message; io.EOF says that the other end is closed. The descriptors are the caller's.
func (l *link) receive(message any) (fds []int, err error) {
	b, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4*MaxQueuePairs))
	var n, oobn int
	err = l.control(func(fd int) (err error) {
		n, oobn, _, _, err = unix.Recvmsg(fd, b, oob, unix.MSG_CMSG_CLOEXEC)
		return err
	}, false)
	if err != nil {
		return nil, err
	}
	controls, _ := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range controls {
		got, _ := unix.ParseUnixRights(&controls[i])
		fds = append(fds, got...)
	}
	if n == 0 {
		err = io.EOF
	} else {
		err = json.Unmarshal(b[:n], message)
	}
	if err != nil {
		closeAll(fds)
		return nil, err
	}
	return fds, nil
}

// control runs a call that may have to wait for the socket.
func (l *link) control(call func(fd int) error, write bool) error {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return err
	}
	wait := raw.Read
	if write {
		wait = raw.Write
	}
	var failed error
	err = wait(func(fd uintptr) bool {
		for failed = unix.EINTR; errors.Is(failed, unix.EINTR); {
			failed = call(int(fd))
		}
		return !errors.Is(failed, unix.EAGAIN)
	})
	return errors.Join(err, failed)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
