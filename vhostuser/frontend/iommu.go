package frontend

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
)

// IOVABase is what the device's addresses exceed guest addresses by behind an IOMMU.
const IOVABase = 1 << 50

const iommuPage = 4096

// IOMMU emulates an IOMMU between a client's device and its memory: it answers
// the back-end's misses with one page each, from a goroutine of its own, as QEMU
// does from its main loop. The fields are set before the client is made.
type IOMMU struct {
	// Answer, when set, decides about each miss: whether it is answered, and how
	// late. By default all are at once.
	Answer func(miss vhostuser.IOTLBMsg) (delay time.Duration, answered bool)
	// Perm are the access rights in answers, 0 for all.
	Perm uint8

	c    *Client
	sock *net.UnixConn
	done chan struct{}

	mu     sync.Mutex
	misses []vhostuser.IOTLBMsg
	err    error
}

// attach acknowledges the feature and hands over the channel for misses.
func (u *IOMMU) attach(c *Client, offered virtio.Features) error {
	const need = vhostuser.ProtoBackendReq | vhostuser.ProtoReplyAck
	if !offered.Has(virtio.FAccessPlatform) || c.Protocol&need != need {
		return fmt.Errorf("the back-end offers no IOMMU support: features %v, protocol features %v", offered, c.Protocol)
	}
	c.Features |= virtio.FAccessPlatform
	u.c = c
	return u.Reattach()
}

// Reattach hands over another channel for misses and closes the one before.
func (u *IOMMU) Reattach() error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socketpair: %w", err)
	}
	defer unix.Close(pair[1])
	f := os.NewFile(uintptr(pair[0]), "back-end channel")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return err
	}
	if err := u.c.DoAck(vhostuser.ReqSetBackendReqFD, nil, pair[1]); err != nil {
		return errors.Join(err, conn.Close())
	}
	if err := u.Close(); err != nil {
		return errors.Join(err, conn.Close())
	}
	u.sock, u.done = conn.(*net.UnixConn), make(chan struct{})
	go u.serve(u.sock, u.done)
	return nil
}

// Close ends the channel; the client's Close does it too.
func (u *IOMMU) Close() error {
	if u.sock == nil {
		return nil
	}
	err := u.sock.Close()
	<-u.done
	u.sock = nil
	return errors.Join(err, u.Err())
}

func (u *IOMMU) serve(sock *net.UnixConn, done chan struct{}) {
	var answers sync.WaitGroup
	defer close(done)
	defer answers.Wait()
	for {
		msg, err := readMiss(sock)
		if err != nil {
			if !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.EOF) {
				u.fail(err)
			}
			return
		}
		u.mu.Lock()
		u.misses = append(u.misses, msg)
		u.mu.Unlock()
		delay, answered := time.Duration(0), true
		if u.Answer != nil {
			delay, answered = u.Answer(msg)
		}
		switch {
		case !answered:
		case delay == 0:
			u.answer(msg.IOVA)
		default:
			answers.Go(func() {
				time.Sleep(delay)
				u.answer(msg.IOVA)
			})
		}
	}
}

func readMiss(r io.Reader) (msg vhostuser.IOTLBMsg, err error) {
	var b [vhostuser.HeaderLen + 32]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return msg, err
	}
	h := vhostuser.DecodeHeader(b[:])
	msg = vhostuser.DecodeIOTLBMsg(b[vhostuser.HeaderLen:])
	if h != (vhostuser.Header{Request: vhostuser.BackendIOTLBMsg, Flags: vhostuser.FlagVersion, Size: 32}) || msg.Type != vhostuser.IOTLBMiss {
		return msg, fmt.Errorf("the back-end sent %+v, %+v instead of a miss", h, msg)
	}
	return msg, nil
}

// answer tells the translation of a page. An address without memory has none.
func (u *IOMMU) answer(iova uint64) {
	page := iova &^ (iommuPage - 1)
	uva := u.c.Mem.UVA(page - IOVABase)
	if uva == 0 {
		return
	}
	perm := u.Perm
	if perm == 0 {
		perm = 3
	}
	err := u.c.IOTLB(vhostuser.IOTLBMsg{IOVA: page, Size: iommuPage, UVA: uva, Perm: perm, Type: vhostuser.IOTLBUpdate})
	if err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.EOF) && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
		u.fail(err)
	}
}

func (u *IOMMU) fail(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.err = errors.Join(u.err, err)
}

// Misses returns what the back-end has asked for so far.
func (u *IOMMU) Misses() []vhostuser.IOTLBMsg {
	u.mu.Lock()
	defer u.mu.Unlock()
	return append([]vhostuser.IOTLBMsg(nil), u.misses...)
}

// Err returns what went wrong behind the client's back.
func (u *IOMMU) Err() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.err
}

// Invalidate takes translations back.
func (u *IOMMU) Invalidate(iova, size uint64) error {
	return u.c.IOTLB(vhostuser.IOTLBMsg{IOVA: iova, Size: size, Type: vhostuser.IOTLBInvalidate})
}

// IOTLB sends an IOTLB message, whose reply a non-zero value makes a
// *RefusedError. It asks for the reply that comes in any case, as QEMU does.
func (c *Conn) IOTLB(msg vhostuser.IOTLBMsg) error {
	return c.DoAck(vhostuser.ReqIOTLBMsg, msg.Append(nil))
}
