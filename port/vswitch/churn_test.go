package vswitch

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
)

// endpoint is a guest's side of a queue on a goroutine of its own.
type endpoint struct {
	q     port.Queue
	arena *pagemem.Arena
	owner pagemem.OwnerID
	in    [port.MaxBatch]packet.Packet
	out   [8]packet.Packet
}

// transmit sends a few frames and returns how many there was memory for.
func (e *endpoint) transmit(dst, src []byte, serial uint32) (n int) {
	for ; n < len(e.out); n++ {
		page, ok := e.arena.Alloc(0, pagemem.NoReserve)
		if !ok {
			break
		}
		e.out[n].Reset()
		e.out[n].Append(packet.Frag{Addr: e.arena.Addr(page), Len: 60, Page: page})
		b := e.out[n].Bytes(0)
		copy(b, dst)
		copy(b[6:], src)
		binary.BigEndian.PutUint16(b[12:], 0x88b5)
		binary.BigEndian.PutUint32(b[14:], serial)
	}
	e.q.Send(e.out[:n])
	return n
}

func (e *endpoint) receive(check func(b []byte)) (n int) {
	n = e.q.Recv(e.in[:])
	for i := range e.in[:n] {
		check(e.in[i].Bytes(0))
	}
	packet.Release(e.arena, e.in[:n], e.owner)
	return n
}

// TestChurn: ports and queues come and go while others send to them and flood. Nobody gets another's frames, nothing is left behind.
func TestChurn(t *testing.T) {
	g, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	rig := porttest.NewRig(t)
	var stop atomic.Bool
	var wrong, passed atomic.Int64
	var all sync.WaitGroup
	const guests = 4
	life := func(me int) {
		for !stop.Load() {
			opts := PortOptions{Backlog: MinBacklog}
			if me%2 == 0 {
				opts.MAC = mac(me)
			}
			p, err := g.NewPort(opts)
			if err != nil {
				t.Error(err)
				return
			}
			for range 3 {
				live(t, p, rig, me, guests, &wrong, &passed)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	for me := range guests {
		all.Go(func() { life(me) })
	}
	time.Sleep(time.Second)
	stop.Store(true)
	all.Wait()
	if wrong.Load() > 0 || passed.Load() == 0 {
		t.Errorf("%d frames reached a station they were not for, %d the right one", wrong.Load(), passed.Load())
	}
	if n := g.budget.Held(); n != 0 {
		t.Errorf("%d bytes are still charged", n)
	}
}

// live is one connection of a guest.
func live(t *testing.T, p *Port, rig *porttest.Rig, me, guests int, wrong, passed *atomic.Int64) {
	owner := pagemem.NewOwnerID()
	q, err := p.OpenQueue(0, port.Resources{Arena: rig.Arena, Owner: owner})
	if err != nil {
		t.Error(err)
		return
	}
	defer q.Close()
	e := &endpoint{q: q, arena: rig.Arena, owner: owner}
	for i := range 40 {
		to := rand.IntN(guests)
		dst := []byte(mac(to))
		if i%5 == 0 {
			dst = broadcast
		}
		e.transmit(dst, mac(me), uint32(i))
		e.receive(func(b []byte) {
			passed.Add(1)
			// A pinned port is never looked for stations behind it.
			if me%2 == 0 && b[0] != 0xff && macOf(b) != macOf(mac(me)) || macOf(b[6:]) == macOf(mac(me)) {
				wrong.Add(1)
			}
		})
		if i%10 == 3 {
			_ = q.(port.Enabler).SetEnabled(false)
			_ = q.(port.Enabler).SetEnabled(true)
		}
	}
}

// TestNoFrameIsSleptThrough: receivers that sleep by the rules get everything from several senders.
func TestNoFrameIsSleptThrough(t *testing.T) {
	const senders, each = 3, 2000
	g, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	g.budget.SetLimit(1 << 40)
	rig := porttest.NewRig(t)
	open := func(n int) *endpoint {
		p, err := g.NewPort(PortOptions{MAC: mac(n), Backlog: MaxBacklog})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		owner := pagemem.NewOwnerID()
		q, err := p.OpenQueue(0, port.Resources{Arena: rig.Arena, Owner: owner})
		if err != nil {
			t.Fatal(err)
		}
		return &endpoint{q: q, arena: rig.Arena, owner: owner}
	}
	receiver := open(0)
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(epfd)
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff}
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, receiver.q.ReadyFD(), &ev); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for s := range senders {
		e := open(1 + s)
		all.Go(func() {
			for sent := 0; sent < each; {
				n := e.transmit(mac(0), mac(1+s), uint32(sent))
				if sent += n; n == 0 || sent%128 == 0 {
					time.Sleep(50 * time.Microsecond)
				}
			}
		})
	}
	for got := 0; got < senders*each; {
		if n := receiver.receive(func([]byte) {}); n > 0 || receiver.q.Arm() {
			got += n
			continue
		}
		var events [1]unix.EpollEvent
		n, err := unix.EpollWait(epfd, events[:], 5000)
		if err == nil && n == 0 {
			t.Fatalf("slept through: %d of %d frames; %d lost", got, senders*each, porttest.DropCount(receiver.q, ""))
		}
	}
	all.Wait()
}
