package vhostuser_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// stateChannel is a way for device state: the front-end's end and the one that it hands over.
type stateChannel struct {
	mine   io.ReadWriteCloser
	theirs *os.File
}

func (c stateChannel) fd() int { return int(c.theirs.Fd()) }

// channels are the kinds of descriptors in use: a pipe (QEMU) and a socket (cloud-hypervisor), in
// blocking mode, as they come.
func channel(t testing.TB, socket, load bool) stateChannel {
	t.Helper()
	var fds [2]int
	var err error
	if socket {
		fds, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	} else {
		err = unix.Pipe2(fds[:], unix.O_CLOEXEC)
	}
	if err != nil {
		t.Fatal(err)
	}
	if load && !socket {
		fds[0], fds[1] = fds[1], fds[0]
	}
	c := stateChannel{os.NewFile(uintptr(fds[0]), "mine"), os.NewFile(uintptr(fds[1]), "theirs")}
	t.Cleanup(func() { c.mine.Close(); c.theirs.Close() })
	return c
}

// save fetches the state of a device whose rings are stopped.
func (b *bench) save(socket bool) []byte {
	b.t.Helper()
	c := channel(b.t, socket, false)
	b.must(b.SetDeviceStateFD(vhostuser.StateSave, c.fd()))
	c.theirs.Close()
	got, err := io.ReadAll(c.mine)
	b.must(err)
	b.must(b.CheckDeviceState())
	return got
}

// load offers a state and returns what the back-end says.
func (b *bench) load(socket bool, state []byte) error {
	b.t.Helper()
	c := channel(b.t, socket, true)
	b.must(b.SetDeviceStateFD(vhostuser.StateLoad, c.fd()))
	c.theirs.Close()
	if _, err := c.mine.Write(state); err != nil {
		b.t.Logf("writing the state: %v", err) // the other end gave up
	}
	c.mine.Close()
	return b.CheckDeviceState()
}

// sourceState is the state of a device with rings at 300 and 0x8005 or the like.
func sourceState(t *testing.T, socket bool, edit func(*fakeDevice)) []byte {
	t.Helper()
	dev := newDevice(2)
	if edit != nil {
		edit(dev)
	}
	b := newBench(t, dev).negotiate()
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.must(b.NetSetMTU(9000))
	b.startRing(mem, 0, 300)
	b.startRing(mem, 1, 5)
	for i := range 2 {
		_, err := b.GetVringBase(i)
		b.must(err)
	}
	state := b.save(socket)
	b.checkDevice()
	return state
}

// TestDeviceState moves a state to another device, which resumes where the first one stopped.
func TestDeviceState(t *testing.T) {
	for _, socket := range []bool{false, true} {
		state := sourceState(t, socket, nil)
		dev := newDevice(2)
		b := newBench(t, dev).negotiate()
		b.must(b.load(socket, state))
		dev.peek(func(d *fakeDevice) {
			if d.mtu != 9000 {
				t.Errorf("MTU %d", d.mtu)
			}
		})
		mem := newMemory(t, 1<<20)
		b.shareMemory(mem)
		for i := range 2 { // without SET_VRING_BASE
			b.must(b.SetVringNum(i, 256))
			b.must(b.SetVringAddr(ringAddr(mem, i)))
			b.must(b.SetVringKick(i, eventFD(t)))
		}
		b.must(b.Sync())
		dev.peek(func(d *fakeDevice) {
			if d.running[0].Base != 300 || d.running[1].Base != 5 {
				t.Errorf("rings resume at %#x and %#x", d.running[0].Base, d.running[1].Base)
			}
		})
		b.checkDevice()
	}
}

// TestDeviceStateMessagesWin: what the front-end says counts more than the state.
func TestDeviceStateMessagesWin(t *testing.T) {
	state := sourceState(t, false, nil)
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	b.must(b.NetSetMTU(1400))
	b.must(b.SetVringBase(0, 77))
	b.must(b.load(false, state))
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.must(b.SetVringNum(0, 256))
	b.must(b.SetVringAddr(ringAddr(mem, 0)))
	b.must(b.SetVringKick(0, eventFD(t)))
	b.must(b.Sync())
	dev.peek(func(d *fakeDevice) {
		if d.mtu != 1400 || d.running[0].Base != virtqueue.Position(77) {
			t.Errorf("MTU %d, base %d", d.mtu, d.running[0].Base)
		}
	})
	b.checkDevice()
}

// TestDeviceStateEmpty: no state is a state (vhost-user.rst).
func TestDeviceStateEmpty(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.must(b.load(false, nil))
	b.must(b.load(true, nil))
	if err := b.CheckDeviceState(); !isRefused(err) {
		t.Errorf("CHECK without a transfer: %v", err)
	}
}

// TestBadDeviceState_C80: garbage, truncated, of another version, for a larger or another device: a
// non-zero answer, and nothing of it is taken over.
func TestBadDeviceState_C80(t *testing.T) {
	good := sourceState(t, false, nil)
	more := func(d *fakeDevice) { d.features |= virtio.FNetGuestTSO4 }
	edit := func(f func([]byte)) []byte { b := bytes.Clone(good); f(b); return b }
	states := map[string][]byte{
		"garbage":            bytes.Repeat([]byte("vhostd"), 100),
		"one byte":           {1},
		"too much":           make([]byte, 1<<20),
		"another version":    edit(func(b []byte) { b[8] = 2 }),
		"a flipped bit":      edit(func(b []byte) { b[20] ^= 1 }),
		"a byte more":        append(bytes.Clone(good), 0),
		"foreign features":   sourceState(t, false, more),
		"two states":         append(bytes.Clone(good), good...),
		"length of 4 GiB":    edit(func(b []byte) { copy(b[12:], []byte{255, 255, 255, 255}) }),
		"length of nothing":  edit(func(b []byte) { copy(b[12:], []byte{0, 0, 0, 0}) }),
		"number of 4G rings": edit(func(b []byte) { copy(b[28:], []byte{255, 255, 255, 255}) }),
	}
	for n := range len(good) {
		states[fmt.Sprint("truncated to ", n)] = good[:n]
	}
	delete(states, "truncated to 0") // is the empty state
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	fds := openFDs()
	for name, state := range states {
		if err := b.load(len(name)%2 == 0, state); !isRefused(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	dev.peek(func(d *fakeDevice) {
		if d.mtu != 0 {
			t.Error("a bad state changed the MTU")
		}
	})
	if n := openFDs(); n > fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
	b.must(b.load(false, good))
	b.checkDevice()
}

// TestHangingDeviceState_C80: a pipe that nobody drains or closes ends with the time limit, and a
// later transfer or the end of the connection end it sooner.
func TestHangingDeviceState_C80(t *testing.T) {
	const limit = 200 * time.Millisecond
	dev := newDevice(2)
	b := newBench(t, dev, func(o *vhostuser.Options) { o.StateTimeout = limit }).negotiate()
	fds := openFDs()
	for _, socket := range []bool{false, true} {
		stuck := channel(t, socket, true)
		b.must(b.SetDeviceStateFD(vhostuser.StateLoad, stuck.fd()))
		begin := time.Now()
		if err := b.CheckDeviceState(); !isRefused(err) {
			t.Errorf("never closed: %v", err)
		}
		if took := time.Since(begin); took > 3*time.Second {
			t.Errorf("the answer took %v", took)
		}
		full := channel(t, socket, false)
		fill(t, full.fd())
		b.must(b.SetDeviceStateFD(vhostuser.StateSave, full.fd()))
		if err := b.CheckDeviceState(); !isRefused(err) {
			t.Errorf("never drained: %v", err)
		}
		b.must(b.SetDeviceStateFD(vhostuser.StateLoad, stuck.fd()))
		b.must(b.load(socket, nil))
		b.must(b.SetDeviceStateFD(vhostuser.StateLoad, stuck.fd()))
		for _, c := range []stateChannel{stuck, full} {
			c.mine.Close()
			c.theirs.Close()
		}
		if err := b.CheckDeviceState(); err != nil {
			t.Errorf("closed without a byte: %v", err)
		}
	}
	if n := openFDs(); n > fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
	gone := channel(t, false, false)
	gone.mine.Close()
	b.must(b.SetDeviceStateFD(vhostuser.StateSave, gone.fd()))
	if err := b.CheckDeviceState(); !isRefused(err) {
		t.Errorf("nobody reads: %v", err)
	}
	last := channel(t, false, true)
	b.must(b.SetDeviceStateFD(vhostuser.StateLoad, last.fd()))
	b.Conn.Close()
	b.must(b.wait())
	b.checkDevice()
}

// TestHeldDeviceState: a transfer that cannot end, because another thread holds the pipe's lock while it splices from an
// empty socket, is the only one of its guest: a session takes no other, and does not end before it.
func TestHeldDeviceState(t *testing.T) {
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	held, source := channel(t, false, true), channel(t, true, true)
	theirs, mine := held.fd(), int(held.mine.(*os.File).Fd())
	spliced := make(chan error, 1)
	go func() {
		_, err := unix.Splice(source.fd(), nil, mine, nil, 4096, 0)
		spliced <- err
	}()
	time.Sleep(50 * time.Millisecond)
	b.must(b.SetDeviceStateFD(vhostuser.StateLoad, theirs))
	time.Sleep(50 * time.Millisecond)
	other := channel(t, true, true)
	for range 2 {
		if err := b.SetDeviceStateFD(vhostuser.StateLoad, other.fd()); !isRefused(err) {
			t.Errorf("a transfer beside one that is held: %v", err)
		}
	}
	b.Conn.Close()
	ended := make(chan error, 1)
	go func() { ended <- b.wait() }()
	select {
	case err := <-ended:
		t.Errorf("the session ended before its transfer: %v", err)
	case <-time.After(1500 * time.Millisecond):
		source.mine.Close()
		b.must(<-ended)
	}
	b.must(<-spliced)
	b.checkDevice()
}

// fill writes until the descriptor takes no more.
func fill(t *testing.T, fd int) {
	t.Helper()
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := unix.Write(fd, make([]byte, 4096)); err != nil {
			break
		}
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		t.Fatal(err)
	}
}

func TestDeviceStateRefused(t *testing.T) {
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	c := channel(t, false, false)
	begin := func(direction, phase uint32, fd int) error {
		payload, err := b.Call(vhostuser.ReqSetDeviceStateFD, vhostuser.VringState{Index: direction, Num: phase}.Append(nil), fd)
		b.must(err)
		if len(payload) == 8 && payload[0] == 1 && payload[1] == 1 {
			return os.ErrInvalid
		}
		return nil
	}
	dir, err := os.Open("/")
	b.must(err)
	defer dir.Close()
	for name, err := range map[string]error{
		"direction 2": begin(2, 0, c.fd()), "phase 1": begin(0, 1, c.fd()),
		"a directory": begin(0, 0, int(dir.Fd())), "an eventfd": begin(0, 0, eventFD(t)),
	} {
		if err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	if begin(vhostuser.StateSave, 0, c.fd()) == nil {
		t.Error("a state is saved while a ring runs")
	}
	if !strings.Contains(b.logs.String(), "SET_DEVICE_STATE_FD") {
		t.Errorf("log: %s", b.logs)
	}
	b.checkDevice()
}
