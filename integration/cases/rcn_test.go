package cases

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// TestRCN01_KilledAndStartedAgain: a front-end whose back-end is killed or stopped at any moment goes on with the next one, with every slot of
// its rings. Frames under way may be lost or come twice, but never damaged.
func TestRCN01_KilledAndStartedAgain(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	opts := frontend.Options{Features: plain}
	c := d.connect(mem, opts)
	p := pair(t, c, 0)
	for round := range rounds(6, 40) {
		fullRings(t, p)
		for i := range 200 {
			must(t, p.Stage(virtio.NetHdr{}, numbered(uint64(i)), frontend.Direct))
		}
		must(t, p.TX.Flush())
		time.Sleep(time.Duration(round%6) * 100 * time.Microsecond)
		if round%3 == 2 {
			d.stop()
		} else {
			d.kill()
		}
		left := p.TX.Ring.AvailIdx() - p.TX.Ring.PeekUsedIdx()
		c.Release()
		must(t, c.Close())
		d.start()
		begin := time.Now()
		c = d.connect(mem, opts)
		c.Adopt(p)
		p = pair(t, c, 0)
		must(t, p.DrainTx(patience))
		if took := time.Since(begin); took > 3*time.Second {
			t.Errorf("round %d: the ring works again after %v, want at most 3 s", round, took)
		}
		back := intact(t, p)
		t.Logf("round %d: %d chains were left behind, %d frames came back", round, left, back)
	}
	fullRings(t, p)
	flows(t, p)
}

// intact takes what arrived and demands that each frame is one that was sent.
func intact(t *testing.T, p *frontend.Pair) (n int) {
	t.Helper()
	for {
		_, frame, err := p.RecvFrame(quiet)
		if err != nil {
			return n
		}
		if !bytes.Equal(frame, swapped(numbered(number(frame)))) {
			t.Fatalf("a damaged frame of %d bytes: % x", len(frame), head(frame))
		}
		n++
	}
}

// fullRings sends as many frames as the ring has slots at once, and demands that all of them fill the receive ring.
func fullRings(t *testing.T, p *frontend.Pair) {
	t.Helper()
	size := p.TX.Ring.Size()
	_, err := p.PostRx(size)
	must(t, err)
	if n := p.RX.Ring.Outstanding(); n != size {
		t.Fatalf("%d receive buffers can be posted, want %d", n, size)
	}
	for i := range size {
		must(t, p.Stage(virtio.NetHdr{}, numbered(uint64(i)), frontend.Direct))
	}
	must(t, p.TX.Flush())
	must(t, p.DrainTx(patience))
	for i := range size {
		_, frame, err := p.RecvFrame(patience)
		if err != nil {
			t.Fatalf("frame %d of %d: %v", i, size, err)
		}
		if !bytes.Equal(frame, swapped(numbered(uint64(i)))) {
			t.Fatalf("frame %d of %d is damaged: % x", i, size, head(frame))
		}
	}
	_, err = p.PostRx(size)
	must(t, err)
}

// TestRCN03_ClientDialsAgain: with --client the program dials until there is a front-end, again after each one, and no more once the
// guest is removed.
func TestRCN03_ClientDialsAgain(t *testing.T) {
	d := prepare(t, "echo", "--client")
	d.start()
	mem := memory(t)
	cycles := rounds(4, 10)
	for range cycles {
		l, err := frontend.Listen(d.path)
		must(t, err)
		begin := time.Now()
		conn, err := l.Accept(patience)
		must(t, err)
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("connected %v after the socket appeared, want at most 2 s", took)
		}
		c := frontend.NewClient(conn, frontend.Options{Features: plain})
		must(t, c.Negotiate())
		must(t, c.SetMemory(mem))
		flows(t, pair(t, c, 0))
		must(t, l.Close())
		must(t, c.Close())
		eventually(t, "the program dials again", func() bool { return d.status().State == "connecting" })
		time.Sleep(50 * time.Millisecond)
	}
	if n := d.logged("waiting for the front-end"); n > cycles+1 {
		t.Errorf("%d lines in the log about %d waits", n, cycles+1)
	}
	d.remove()
	l, err := frontend.Listen(d.path)
	must(t, err)
	defer l.Close()
	if conn, err := l.Accept(1500 * time.Millisecond); err == nil {
		conn.Close()
		t.Error("the program dials for a guest that was removed")
	}
}

// remove takes the guest away through the control socket.
func (d *vhostd) remove() {
	d.t.Helper()
	d.command(http.MethodDelete, "/v1/guests/vm0", "", http.StatusNoContent)
}

// add makes a guest on the network echo.
func (d *vhostd) add(name, socket string) {
	d.t.Helper()
	body := fmt.Sprintf(`{"name": %q, "socket": %q, "network": "echo"}`, name, socket)
	d.command(http.MethodPost, "/v1/guests", body, http.StatusCreated)
}

// neighbor is a queue pair of another guest of the same program, whose traffic nothing may disturb.
func (d *vhostd) neighbor() *frontend.Pair {
	d.t.Helper()
	socket := d.path + "-neighbor"
	d.add("neighbor", socket)
	c, err := frontend.Connect(socket, memory(d.t, 16<<20), frontend.Options{Features: plain})
	must(d.t, err)
	d.t.Cleanup(func() { c.Close() })
	return pair(d.t, c, 0)
}

// command asks the control socket to change something and wants an answer within a second, as patient as the machine needs.
func (d *vhostd) command(method, url, body string, want int) {
	d.t.Helper()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", d.control)
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: patience}
	request, err := http.NewRequest(method, "http://vhostd"+url, strings.NewReader(body))
	must(d.t, err)
	begin := time.Now()
	answer, err := client.Do(request)
	must(d.t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	must(d.t, err)
	if answer.StatusCode != want {
		d.t.Errorf("%s %s: %s: %s", method, url, answer.Status, text)
	}
	soon(d.t, method+" was answered", begin)
}

// TestRCN08_ServedAgainAndAgain: front-ends come and go on one socket, whose file stays the same.
func TestRCN08_ServedAgainAndAgain(t *testing.T) {
	d := serve(t, "echo")
	inode := inodeOf(t, d.path)
	for range rounds(20, 200) {
		// Ask, leave and come again, as cloud-hypervisor does.
		c := d.dial()
		_, err := c.GetFeatures()
		must(t, err)
		_, err = c.GetProtocolFeatures()
		must(t, err)
		must(t, c.Close())
		d.serves()
	}
	if now := inodeOf(t, d.path); now != inode {
		t.Errorf("the socket file has inode %d, was %d", now, inode)
	}
}

func inodeOf(t *testing.T, path string) uint64 {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	return info.Sys().(*syscall.Stat_t).Ino
}

// TestRCN08_SecondFrontEndIsRefused: while one is connected, others are turned away, many at once too, and change nothing.
func TestRCN08_SecondFrontEndIsRefused(t *testing.T) {
	d := serve(t, "echo")
	c := d.connect(memory(t), frontend.Options{Features: plain})
	p := pair(t, c, 0)
	base := d.use()
	for range rounds(50, 1000) {
		other := d.dial()
		must(t, other.AwaitClose(patience))
		must(t, other.Close())
	}
	var crowd [256]*frontend.Conn
	for i := range crowd {
		crowd[i] = d.dial()
	}
	for _, other := range crowd {
		must(t, other.AwaitClose(patience))
		must(t, other.Close())
	}
	flows(t, p)
	d.flat(base)
}

// TestRCN09_ConnectionsThatEndAnywhere: a front-end may go away between two messages and within one. That is no error, and whoever
// is slow is waited for.
func TestRCN09_ConnectionsThatEndAnywhere(t *testing.T) {
	d := serve(t, "echo")
	d.serves()
	base := d.use()
	for range rounds(200, 1000) {
		must(t, d.dial().Close())
	}
	whole := message(vhostuser.ReqSetVringAddr, make([]byte, 40))
	for range rounds(3, 20) {
		for n := 1; n < vhostuser.HeaderLen; n++ {
			d.cut(whole[:n])
		}
		d.cut(whole[:vhostuser.HeaderLen])
		d.cut(whole[:len(whole)-1])
	}
	eventually(t, "no front-end is connected", func() bool { return !d.status().Connected })
	for _, level := range []string{"level=WARN", "level=ERROR"} {
		if n := d.logged(level); n != 0 {
			t.Errorf("%d lines with %s", n, level)
		}
	}
	d.idle(0.1, 300*time.Millisecond)
	d.flat(base)

	c := d.dial()
	for _, b := range message(vhostuser.ReqGetFeatures, nil) {
		must(t, c.SendRaw([]byte{b}))
		time.Sleep(time.Millisecond)
	}
	r, err := c.Recv(patience)
	must(t, err)
	if _, ok := r.U64(); !ok || r.Request != vhostuser.ReqGetFeatures {
		t.Errorf("reply to a message sent byte by byte: %+v", r)
	}
	must(t, c.Close())
	d.serves()
}

// cut sends the beginning of a message and goes away.
func (d *vhostd) cut(b []byte) {
	d.t.Helper()
	c := d.dial()
	if err := c.SendRaw(b); err != nil {
		d.t.Logf("front-end turned away: %v", err)
	}
	must(d.t, c.Close())
	d.disconnected()
}

// TestRCN07_RemovedWhileThePeerLeaves removes the guest at the moment when its front-end goes away, and adds it again at once.
func TestRCN07_RemovedWhileThePeerLeaves(t *testing.T) {
	d := serve(t, "echo")
	var base use
	for round := range rounds(40, 200) {
		if round == 10 {
			base = d.use()
		}
		mem, err := frontend.NewMemory(8 << 20)
		must(t, err)
		c := d.connectLater(mem, frontend.Options{Features: plain})
		p, err := c.StartPair(0)
		must(t, err)
		_, err = p.PostRx(64)
		must(t, err)
		for i := range 32 {
			must(t, p.Stage(virtio.NetHdr{}, numbered(uint64(i)), frontend.Direct))
		}
		must(t, p.TX.Flush())
		left := make(chan error)
		go func() {
			time.Sleep(time.Duration(round%5) * 100 * time.Microsecond)
			left <- c.Close()
		}()
		d.remove()
		must(t, <-left)
		must(t, mem.Close())
		d.add("vm0", d.path)
	}
	d.flat(base)
	d.serves()
}

// TestRCN07_RemovedWithinAMessage: a front-end that stopped within a message does not delay the removal of its guest.
func TestRCN07_RemovedWithinAMessage(t *testing.T) {
	d := serve(t, "echo")
	for n := 1; n < 50; n += 8 {
		c := d.dial()
		must(t, c.SendRaw(message(vhostuser.ReqSetVringAddr, make([]byte, 40))[:n]))
		eventually(t, "the front-end is connected", func() bool { return d.status().Connected })
		d.remove()
		must(t, c.AwaitClose(patience))
		must(t, c.Close())
		d.add("vm0", d.path)
	}
	d.serves()
}

// TestRCN08_FeaturesOfTheNextFrontEnd: nothing of one front-end's features is left for the next.
func TestRCN08_FeaturesOfTheNextFrontEnd(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	for _, f := range []virtio.Features{
		plain, plain &^ virtio.FNetMrgRxBuf, 0, plain &^ virtio.FRingEventIdx, virtio.FVersion1,
		virtio.FNetMrgRxBuf, virtio.FAnyLayout, // no VERSION_1: headers of 12 and of 10 bytes
		plain | virtio.FNetCSum | virtio.FNetGuestCSum | virtio.FNetHostTSO4, plain,
	} {
		c := d.connect(mem, frontend.Options{Features: f})
		p := pair(t, c, 0)
		for range 3 {
			flows(t, p)
		}
		must(t, c.Close())
		d.disconnected()
		if s := d.status(); len(s.Features)+len(s.ProtocolFeatures)+len(s.Rings)+s.MemoryRegions != 0 || s.Peer != "" {
			t.Errorf("the status still shows a front-end that has left: %+v", s)
		}
	}
}

// TestRCN09_SlowPeerHoldsNobody: a front-end that stops within a message holds neither other guests nor the control socket.
func TestRCN09_SlowPeerHoldsNobody(t *testing.T) {
	d := serve(t, "echo")
	p := d.neighbor()
	c := d.dial()
	must(t, c.SendRaw(message(vhostuser.ReqSetVringAddr, make([]byte, 40))[:30]))
	time.Sleep(quiet)
	for range 20 {
		flows(t, p)
	}
	begin := time.Now()
	if s := d.status(); !s.Connected {
		t.Errorf("the slow front-end is not connected: %+v", s)
	}
	soon(t, "the status was told", begin)
	must(t, c.Close())
	d.serves()
}

// TestRCN09_PeerThatNeverReads: replies that nobody takes end that session after the time limit, nothing else.
func TestRCN09_PeerThatNeverReads(t *testing.T) {
	testmain.Long(t) // the limit is ten seconds
	d := serve(t, "echo")
	c := d.dial()
	c.Timeout = 30 * time.Second
	flood := bytes.Repeat(message(vhostuser.ReqGetFeatures, nil), 1000)
	for c.SendRaw(flood) == nil {
	}
	d.disconnected()
	must(t, c.Close())
	d.serves()
}
