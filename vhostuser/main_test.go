package vhostuser_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

func TestMain(m *testing.M) {
	vhostuser.PostcopyHelper()
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:"), testmain.Goroutines(), eventfds()))
}

// eventfds is a leak check for descriptors that testmain.Files leaves out.
func eventfds() testmain.Leak {
	before := countFDs("anon_inode:[eventfd]")
	return func() error {
		// One more is the runtime's own.
		if now := countFDs("anon_inode:[eventfd]"); now > before+1 {
			return fmt.Errorf("%d eventfds, %d at the start", now, before)
		}
		return nil
	}
}

func countFDs(target string) int {
	entries, _ := os.ReadDir("/proc/self/fd")
	n := 0
	for _, e := range entries {
		if s, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && strings.Contains(s, target) {
			n++
		}
	}
	return n
}

// openFDs counts all descriptors of the process but the directory being read.
func openFDs() int { return countFDs("") }

// logBuffer collects log lines; any goroutine may write.
type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) lines() int { return strings.Count(l.String(), "\n") }

// bench is a session over a socket pair, its device and the front-end.
type bench struct {
	*frontend.Conn
	t       testing.TB
	dev     *fakeDevice
	session *vhostuser.Session
	cancel  context.CancelFunc
	done    chan error
	logs    *logBuffer
	ended   bool
}

func socketPair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	wrap := func(fd int) *net.UnixConn {
		f := os.NewFile(uintptr(fd), "socketpair")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		return c.(*net.UnixConn)
	}
	return wrap(fds[0]), wrap(fds[1])
}

func newBench(t testing.TB, dev *fakeDevice, edit ...func(*vhostuser.Options)) *bench {
	t.Helper()
	front, back := socketPair(t)
	b := &bench{t: t, dev: dev, Conn: frontend.NewConn(front), done: make(chan error, 1), logs: &logBuffer{}}
	opts := vhostuser.Options{Logger: slog.New(slog.NewTextHandler(b.logs, nil))}
	for _, e := range edit {
		e(&opts)
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel = cancel
	b.session = vhostuser.NewSession(back, dev, opts)
	go func() { b.done <- b.session.Serve(ctx) }()
	t.Cleanup(func() {
		b.Conn.Close()
		if !b.ended {
			b.wait()
		}
		cancel()
		b.checkDevice()
	})
	return b
}

// wait returns what Serve returned.
func (b *bench) wait() error {
	b.t.Helper()
	b.ended = true
	select {
	case err := <-b.done:
		return err
	case <-time.After(20 * time.Second):
		b.t.Fatal("Serve did not return")
		return nil
	}
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// negotiate acknowledges everything offered but LOG_ALL, protocol features first as QEMU does.
func (b *bench) negotiate() *bench {
	b.t.Helper()
	p, err := b.GetProtocolFeatures()
	b.must(err)
	b.must(b.SetProtocolFeatures(p))
	f, err := b.GetFeatures()
	b.must(err)
	b.must(b.SetFeatures(f &^ virtio.FVhostLogAll))
	b.must(b.Sync())
	return b
}

func eventFD(t testing.TB) int {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func newMemory(t testing.TB, sizes ...uint64) *frontend.Memory {
	t.Helper()
	m, err := frontend.NewMemory(sizes...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

func (b *bench) shareMemory(m *frontend.Memory) {
	b.t.Helper()
	specs, fds := m.Table()
	b.must(b.SetMemTable(specs, fds))
}

// ringAddr places ring i of up to 1024 entries at a fixed spot in region 0.
func ringAddr(m *frontend.Memory, i int) vhostuser.VringAddr {
	base := m.Regions[0].UVA + uint64(i)*0x8000
	return vhostuser.VringAddr{Index: uint32(i), Desc: base, Avail: base + 0x4000, Used: base + 0x5000}
}

// startRing sends what QEMU sends for one ring.
func (b *bench) startRing(m *frontend.Memory, i int, base uint32) (kick, call int) {
	b.t.Helper()
	kick, call = eventFD(b.t), eventFD(b.t)
	b.must(b.SetVringNum(i, 256))
	b.must(b.SetVringBase(i, base))
	b.must(b.SetVringAddr(ringAddr(m, i)))
	b.must(b.SetVringKick(i, kick))
	b.must(b.SetVringCall(i, call))
	return kick, call
}
