package uffd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Messages go over a SOCK_SEQPACKET pair, one a packet, all of the same length.

type op uint32

const (
	opHello    op = iota + 1 // helper: came up; errno, the userfaultfd attached
	opMap                    // serving process: map value bytes from offset of the attached file; answered with the address as value
	opRegister               // have the faults of the mapping reported
	opUnmap                  // forget the mapping
	opFetch                  // bring the page of value bytes at offset; answered when it is there
)

// ChunkPages and ChunkBytes are how much of a file one answer tells about.
const (
	ChunkPages = 512
	ChunkBytes = ChunkPages << PageShift
	// PageShift is the logarithm of the smallest page size.
	PageShift = 12
)

// Chunk has a bit for each page of 4 KiB of an aligned stretch of a mapping, set if the page is there.
type Chunk [ChunkPages / 64]uint64

// message is of either direction. Answers carry the op and the region of the request.
type message struct {
	op     op
	region uint32
	errno  uint32
	offset uint64
	value  uint64
	chunk  Chunk
}

const messageLen = 32 + 8*len(Chunk{})

func (m *message) encode() []byte {
	b := make([]byte, 0, messageLen)
	for _, v := range [...]uint32{uint32(m.op), m.region, m.errno, 0} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	for _, v := range append([]uint64{m.offset, m.value}, m.chunk[:]...) {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func decode(b []byte) (m message) {
	m.op, m.region, m.errno = op(binary.LittleEndian.Uint32(b)), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])
	m.offset, m.value = binary.LittleEndian.Uint64(b[16:]), binary.LittleEndian.Uint64(b[24:])
	for i := range m.chunk {
		m.chunk[i] = binary.LittleEndian.Uint64(b[32+8*i:])
	}
	return m
}

func (m *message) err() error {
	if m.errno == 0 {
		return nil
	}
	return unix.Errno(m.errno)
}

// errnoOf is err for the wire.
func errnoOf(err error) uint32 {
	var errno unix.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno):
		return uint32(errno)
	}
	return uint32(unix.EIO)
}

// maxFDs is how many descriptors come with a message.
const maxFDs = 2

// recv reads one message and its descriptors, which are the caller's. A closed peer is errClosed.
func recv(sock int) (m message, fds []int, err error) {
	var b [messageLen]byte
	oob := make([]byte, unix.CmsgSpace(4*maxFDs))
	n, oobn, _, _, err := unix.Recvmsg(sock, b[:], oob, unix.MSG_CMSG_CLOEXEC)
	for err == unix.EINTR {
		n, oobn, _, _, err = unix.Recvmsg(sock, b[:], oob, unix.MSG_CMSG_CLOEXEC)
	}
	if err != nil {
		return m, nil, os.NewSyscallError("recvmsg", err)
	}
	controls, _ := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range controls {
		got, _ := unix.ParseUnixRights(&controls[i])
		fds = append(fds, got...)
	}
	switch {
	case n == 0:
		err = errClosed
	case n != messageLen:
		err = fmt.Errorf("message of %d bytes, %d are right", n, messageLen)
	}
	if err != nil {
		closeAll(fds)
		return m, nil, err
	}
	return decode(b[:]), fds, nil
}

var errClosed = errors.New("the other process has ended")

// send sends one message. A full socket makes it wait, or fail with the flag MSG_DONTWAIT.
func send(sock, flags int, m message, fds ...int) error {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	err := unix.Sendmsg(sock, m.encode(), rights, nil, flags|unix.MSG_NOSIGNAL)
	for err == unix.EINTR {
		err = unix.Sendmsg(sock, m.encode(), rights, nil, flags|unix.MSG_NOSIGNAL)
	}
	return os.NewSyscallError("sendmsg", err)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
