package vhostuser_test

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
)

// otherFiles are descriptors on which a write or a look at their readiness may wait for the peer.
func otherFiles(t *testing.T) map[string]int {
	t.Helper()
	files := map[string]int{}
	add := func(name string, fd int, err error) {
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		files[name] = fd
	}
	sockets, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	add("socket", sockets[0], err)
	add("other socket", sockets[1], err)
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	add("epoll", fd, err)
	fd, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)
	add("timerfd", fd, err)
	fd, err = unix.InotifyInit1(unix.IN_CLOEXEC)
	add("inotify", fd, err)
	fd, err = unix.Signalfd(-1, &unix.Sigset_t{}, unix.SFD_CLOEXEC)
	add("signalfd", fd, err)
	fd, err = unix.MemfdCreate("vhost-user-frontend", unix.MFD_CLOEXEC)
	add("memfd", fd, err)
	fd, err = unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	add("/dev/null", fd, err)
	fd, err = unix.Open(".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	add("directory", fd, err)
	return files
}

// TestOnlyEventfdsNotify: any other kind of file could hold the worker that writes to it or waits for it.
func TestOnlyEventfdsNotify(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	b.NeedReply = true
	messages := map[string]func(i, fd int) error{"kick": b.SetVringKick, "call": b.SetVringCall, "err": b.SetVringErr}
	for kind, fd := range otherFiles(t) {
		for name, send := range messages {
			if err := send(0, fd); !isRefused(err) {
				t.Errorf("%s as %s descriptor: %v, want a refusal", kind, name, err)
			}
		}
	}
	var pipe [2]int
	b.must(unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	for name, send := range messages {
		if err := send(0, pipe[0]); !isRefused(err) {
			t.Errorf("pipe as %s descriptor: %v, want a refusal", name, err)
		}
	}
	for _, send := range messages {
		b.must(send(0, eventFD(t)))
	}
	b.checkDevice()
}

// TestDescriptorsOfOneMessage: a peer that attaches descriptors to every byte must not use up those of the process.
func TestDescriptorsOfOneMessage(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	many := make([]int, 253)
	for i := range many {
		many[i] = eventFD(t)
	}
	before := openFDs()
	header := vhostuser.Header{Request: vhostuser.ReqGetConfig, Flags: 1, Size: vhostuser.MaxPayload}.Append(nil)
	b.must(b.SendRaw(header, many...))
	for range 20 {
		if err := b.SendRaw([]byte{0}, many...); err != nil {
			break // the session has ended
		}
	}
	b.must(b.AwaitClose(10 * time.Second))
	if err := b.wait(); err == nil {
		t.Error("the session ended without a reason")
	}
	if n := openFDs(); n > before {
		t.Errorf("%d descriptors open, %d before", n, before)
	}
}
