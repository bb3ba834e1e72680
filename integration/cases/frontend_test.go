package cases

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// detached is queue pair i of a driver that no back-end knows yet, for tests that send the messages themselves. Its client was
// given a socket that nobody reads.
func detached(t testing.TB, mem *frontend.Memory, i int, features virtio.Features) *frontend.Pair {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	file := os.NewFile(uintptr(ends[0]), "front-end")
	defer unix.Close(ends[1])
	defer file.Close()
	conn, err := net.FileConn(file)
	must(t, err)
	c := frontend.NewClient(frontend.NewConn(conn.(*net.UnixConn)), frontend.Options{})
	defer c.Conn.Close()
	c.Mem, c.Features = mem, features
	p, err := c.StartPair(i)
	must(t, err)
	c.Release()
	t.Cleanup(func() { must(t, p.Close()) })
	return p
}

// steps demands that every step succeeds; the functions below are such steps.
func steps(t testing.TB, fs ...func() error) {
	t.Helper()
	must(t, first(fs...))
}

// first runs the steps until one fails.
func first(steps ...func() error) error {
	for i, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

func proto(c *frontend.Conn) func() error {
	return func() error { return c.SetProtocolFeatures(vhostuser.ProtoMQ | vhostuser.ProtoReplyAck) }
}

func features(c *frontend.Conn) func() error {
	return func() error { return c.SetFeatures(plain | virtio.FVhostUserProtocolFeatures) }
}

func memTable(c *frontend.Conn, mem *frontend.Memory) func() error {
	return func() error { return c.SetMemTable(mem.Table()) }
}

func on(c *frontend.Conn, indexes ...int) func() error {
	return func() error { return enable(c, true, indexes...) }
}

func calls(c *frontend.Conn, p *frontend.Pair) func() error {
	return func() error {
		return first(func() error { return c.SetVringCall(p.RX.Index, p.RX.CallFD) }, func() error { return c.SetVringCall(p.TX.Index, p.TX.CallFD) })
	}
}

func rings(c *frontend.Conn, p *frontend.Pair) func() error {
	return func() error {
		return first(func() error { return setRing(c, p.RX, 0) }, func() error { return setRing(c, p.TX, 0) })
	}
}

func word(v uint64) []byte {
	b := make([]byte, 8)
	for i := range b {
		b[i] = byte(v >> (8 * i))
	}
	return b
}

// drainEvents takes what the call descriptors count.
func drainEvents(t *testing.T, p *frontend.Pair) {
	t.Helper()
	for _, q := range []*frontend.Queue{p.RX, p.TX} {
		for q.WaitCall(time.Millisecond) == nil {
		}
	}
}

// setRing sends the messages of a ring, the kick descriptor last.
func setRing(c *frontend.Conn, q *frontend.Queue, base uint32) error {
	return errors.Join(
		c.SetVringNum(q.Index, uint32(q.Ring.Size())), c.SetVringBase(q.Index, base), c.SetVringAddr(q.Addr()),
		c.SetVringCall(q.Index, q.CallFD), c.SetVringKick(q.Index, q.KickFD))
}

func enable(c *frontend.Conn, on bool, rings ...int) error {
	for _, i := range rings {
		if err := c.SetVringEnable(i, on); err != nil {
			return err
		}
	}
	return nil
}

// session is a connection with features and memory agreed on, every message acknowledged.
func (d *vhostd) session(mem *frontend.Memory, features virtio.Features) *frontend.Conn {
	d.t.Helper()
	c := d.dial()
	must(d.t, negotiate(c, features))
	must(d.t, share(c, mem))
	return c
}

func negotiate(c *frontend.Conn, features virtio.Features) error {
	err := errors.Join(c.SetOwner(), c.SetProtocolFeatures(vhostuser.ProtoMQ|vhostuser.ProtoReplyAck|vhostuser.ProtoStatus))
	c.NeedReply = true
	return errors.Join(err, c.SetFeatures(features|virtio.FVhostUserProtocolFeatures))
}

func share(c *frontend.Conn, mem *frontend.Memory) error {
	specs, fds := mem.Table()
	return table(c, specs, fds)
}

// table sends SET_MEM_TABLE and waits for its acknowledgement.
func table(c *frontend.Conn, specs []guestmem.RegionSpec, fds []int) error {
	return c.DoAck(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, specs), fds...)
}

// serves demands that the program is well: a front-end connects and its frames flow.
func (d *vhostd) serves() {
	d.t.Helper()
	mem, err := frontend.NewMemory(8 << 20)
	must(d.t, err)
	c, err := frontend.Connect(d.path, mem, frontend.Options{Features: plain})
	must(d.t, err)
	flows(d.t, pair(d.t, c, 0))
	must(d.t, c.Close())
	must(d.t, mem.Close())
	d.disconnected()
}

// mustRefuse demands a non-zero acknowledgement.
func mustRefuse(t testing.TB, what string, err error) {
	t.Helper()
	var r *frontend.RefusedError
	if !errors.As(err, &r) {
		t.Errorf("%s: %v, want a refusal", what, err)
	}
}

// logged counts the lines of the program's output that contain text.
func (d *vhostd) logged(text string) (n int) {
	for line := range strings.Lines(d.Output()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// nothing demands that no frame comes and no chain of q is used for a while.
func nothing(t testing.TB, q *frontend.Queue) {
	t.Helper()
	time.Sleep(quiet)
	if q.Ring.HasUsed() {
		t.Errorf("ring %d: chains were used", q.Index)
	}
}

// load sends numbered frames through the echo network and judges what comes back, on a goroutine of its own.
type load struct {
	pair  *frontend.Pair
	stop  chan struct{}
	halt  func() // closes stop
	done  chan struct{}
	err   error // valid once done is closed
	count uint64
}

const window = 48 // frames under way

// startLoad begins; end stops and demands that everything came back.
func startLoad(t testing.TB, p *frontend.Pair) *load {
	l := &load{pair: p, stop: make(chan struct{}), done: make(chan struct{})}
	l.halt = sync.OnceFunc(func() { close(l.stop) })
	go func() {
		defer close(l.done)
		l.err = l.run()
	}()
	// A test that fails unmaps the guest's memory next.
	t.Cleanup(func() { l.halt(); <-l.done })
	return l
}

// end stops the load and demands that every frame came back once and in order.
func (l *load) end(t testing.TB) (frames uint64) {
	t.Helper()
	l.halt()
	<-l.done
	if l.err != nil {
		t.Fatalf("after %d frames: %v", l.count, l.err)
	}
	if l.count == 0 {
		t.Fatal("no frame came back")
	}
	return l.count
}

func (l *load) run() error {
	var sent uint64
	for stopped := false; !stopped || l.count < sent; {
		select {
		case <-l.stop:
			stopped = true
		default:
		}
		if _, err := l.pair.PostRx(256); err != nil {
			return err
		}
		for ; !stopped && sent-l.count < window; sent++ {
			if err := l.pair.Stage(virtio.NetHdr{}, numbered(sent), frontend.Layout(sent%3)); err != nil {
				return fmt.Errorf("frame %d: %w", sent, err)
			}
		}
		if err := l.pair.TX.Flush(); err != nil {
			return err
		}
		if sent == l.count {
			return nil
		}
		if err := l.receive(); err != nil {
			return err
		}
	}
	return l.pair.DrainTx(patience)
}

func (l *load) receive() error {
	_, frame, err := l.pair.RecvFrame(patience)
	for ok := true; ok; _, frame, ok, err = l.pair.TryRecv() {
		if err != nil {
			return err
		}
		if want := swapped(numbered(l.count)); !bytes.Equal(frame, want) {
			return fmt.Errorf("frame %d: got %d bytes with number %d, want %d bytes", l.count, len(frame), number(frame), len(want))
		}
		l.count++
	}
	return err
}

// numbered is frame n of a load. Its length varies with n.
func numbered(n uint64) []byte {
	f := frameOf(60+int(n*37%1400), byte(n))
	binary.BigEndian.PutUint64(f[14:], n)
	return f
}

func number(frame []byte) uint64 {
	if len(frame) < 22 {
		return 0
	}
	return binary.BigEndian.Uint64(frame[14:])
}
