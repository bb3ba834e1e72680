package guestmem_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
)

// Requests of linux/fuse.h.
const (
	fuseGetattr = 3
	fuseOpen    = 14
	fuseStatfs  = 17
	fuseInit    = 26
)

// fuseFile opens a file of size bytes that is the root of a FUSE file system, whose server never answers a read.
func fuseFile(t *testing.T, size uint64) int {
	t.Helper()
	testmain.NeedRoot(t)
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		testmain.Skip(t, "needs /dev/fuse: %v", err)
	}
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("vhostd-test", path, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=100000,user_id=0,group_id=0", dev)); err != nil {
		unix.Close(dev)
		testmain.Skip(t, "needs to mount a FUSE file system: %v", err)
	}
	var server sync.WaitGroup
	server.Go(func() { serveFuse(dev, size) })
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		server.Wait()
		unix.Close(dev)
	})
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// serveFuse answers what opening and examining the file asks for, until the file system is gone.
func serveFuse(dev int, size uint64) {
	attr := make([]byte, 88)
	binary.NativeEndian.PutUint64(attr, 1)
	binary.NativeEndian.PutUint64(attr[8:], size)
	binary.NativeEndian.PutUint32(attr[60:], unix.S_IFREG|0o600)
	binary.NativeEndian.PutUint32(attr[64:], 1)
	init := make([]byte, 64)
	binary.NativeEndian.PutUint32(init, 7)
	binary.NativeEndian.PutUint32(init[4:], 31)
	binary.NativeEndian.PutUint32(init[20:], 4096)
	answers := map[uint32][]byte{
		fuseInit: init, fuseGetattr: append(make([]byte, 16), attr...), fuseOpen: make([]byte, 16), fuseStatfs: make([]byte, 80),
	}
	buf := make([]byte, 1<<17)
	for {
		n, err := unix.Read(dev, buf)
		if err == unix.EINTR || err == unix.EAGAIN || err == unix.ENOENT {
			continue
		}
		if err != nil || n < 16 {
			return
		}
		answer, served := answers[binary.NativeEndian.Uint32(buf[4:])]
		reply := make([]byte, 16, 16+len(answer))
		if !served {
			binary.NativeEndian.PutUint32(reply[4:], ^uint32(unix.ENOSYS)+1)
		}
		copy(reply[8:], buf[8:16]) // the request's number
		reply = append(reply, answer...)
		binary.NativeEndian.PutUint32(reply, uint32(len(reply)))
		_, _ = unix.Write(dev, reply)
	}
}
