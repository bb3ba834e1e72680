package frontend_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:"), testmain.Goroutines()))
}

const wait = 10 * time.Second

// serve listens at a fresh path and serves dev, one connection after the other.
func serve(t *testing.T, dev vhostuser.Device) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			if err := vhostuser.Serve(ctx, c, dev, vhostuser.Options{}); err != nil && ctx.Err() == nil {
				t.Errorf("Serve: %v", err)
			}
		}
	}()
	t.Cleanup(func() { cancel(); l.Close(); <-done })
	return path
}

func memory(t *testing.T, sizes ...uint64) *frontend.Memory {
	t.Helper()
	m, err := frontend.NewMemory(sizes...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { must(t, m.Close()) })
	return m
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func connect(t *testing.T, path string, mem *frontend.Memory, opts frontend.Options) *frontend.Client {
	t.Helper()
	c, err := frontend.Connect(path, mem, opts)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func frameOf(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i) + seed
	}
	return b
}

// echo sends frames of many sizes in every layout and wants them back.
func echo(t *testing.T, p *frontend.Pair, sizes ...int) {
	t.Helper()
	if _, err := p.PostRx(256); err != nil {
		t.Fatal(err)
	}
	for i, n := range sizes {
		for _, layout := range []frontend.Layout{frontend.Direct, frontend.Chained, frontend.Indirect} {
			want := frameOf(n, byte(i))
			must(t, p.SendTx(virtio.NetHdr{HdrLen: 42}, want, layout))
			hdr, got, err := p.RecvFrame(wait)
			must(t, err)
			if !bytes.Equal(got, want) || hdr.HdrLen != 42 {
				t.Fatalf("frame of %d bytes, layout %d: got %d bytes, header %+v", n, layout, len(got), hdr)
			}
			_, err = p.PostRx(256)
			must(t, err)
		}
	}
	must(t, p.DrainTx(wait))
}

func TestEchoInEveryOrder(t *testing.T) {
	const packed = virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FRingIndirectDesc | virtio.FRingPacked
	dev := newLoop(2)
	dev.features |= virtio.FRingPacked | virtio.FInOrder
	path := serve(t, dev)
	for name, opts := range map[string]frontend.Options{
		"qemu":             {},
		"dpdk":             {Order: frontend.DPDK, RingSize: 512},
		"cloud-hypervisor": {Order: frontend.CloudHypervisor, RingSize: 16},
		"no event index":   {Features: virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FRingIndirectDesc},
		"odd ring places":  {Place: driver.Odd, RingSize: 64},
		"small buffers":    {RxBuf: 100},
		"acknowledge all":  {NeedReply: true, Protocol: vhostuser.ProtoReplyAck},
		"packed":           {Features: packed | virtio.FRingEventIdx},
		"packed, flags":    {Features: packed, RingSize: 100, RxBuf: 300},
		"packed, in order": {Features: packed | virtio.FInOrder, Order: frontend.DPDK, RingSize: 255},
		"in order":         {Features: virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FRingIndirectDesc | virtio.FInOrder},
	} {
		t.Run(name, func(t *testing.T) {
			opts.TxBuf, opts.Chunk = 12+9000, 700
			mem := memory(t, 32<<20, 1<<20)
			c := connect(t, path, mem, opts)
			p, err := c.StartPair(0)
			must(t, err)
			echo(t, p, 60, 1, 88, 89, 700, 1514)
			rx, tx, err := c.Stop(0)
			must(t, err)
			if rx != p.RX.Driver.LastUsed() || tx != p.TX.Driver.LastUsed() {
				t.Errorf("positions %#x and %#x, the driver is at %#x and %#x", rx, tx, p.RX.Driver.LastUsed(), p.TX.Driver.LastUsed())
			}
			_, err = c.StartPair(0)
			must(t, err)
			echo(t, p, 60)
			_, _, err = c.Stop(0)
			must(t, err)
			p.Reset() // a new driver
			_, err = c.StartPair(0)
			must(t, err)
			echo(t, p, 60)
		})
	}
}

func TestSecondPairAndLargeFrames(t *testing.T) {
	mem := memory(t, 64<<20)
	c := connect(t, serve(t, newLoop(2)), mem, frontend.Options{TxBuf: 12 + 65550, Chunk: 4096, RingSize: 64, RxBuf: 4096})
	for i := range 2 {
		p, err := c.StartPair(i)
		must(t, err)
		echo(t, p, 60, 9000, 65550)
	}
}

func TestFullRing(t *testing.T) {
	mem := memory(t, 32<<20)
	c := connect(t, serve(t, newLoop(1)), mem, frontend.Options{RingSize: 16})
	p, err := c.StartPair(0)
	must(t, err)
	sent := 0
	for {
		if err := p.Stage(virtio.NetHdr{}, frameOf(60, 0), frontend.Direct); err != nil {
			if !errors.Is(err, frontend.ErrFull) {
				t.Fatal(err)
			}
			break
		}
		sent++
	}
	if sent != 16 {
		t.Errorf("%d frames fit in a ring of 16", sent)
	}
	must(t, p.TX.Flush())
	must(t, p.DrainTx(wait))
	if err := p.SendTx(virtio.NetHdr{}, make([]byte, 4096), frontend.Direct); err == nil {
		t.Error("a frame larger than TxBuf was accepted")
	}
}

// TestWaitCall: a device that forgets to call must not look right.
func TestWaitCall(t *testing.T) {
	for _, mute := range []bool{false, true} {
		dev := newLoop(1)
		dev.mute = mute
		c := connect(t, serve(t, dev), memory(t, 32<<20), frontend.Options{})
		p, err := c.StartPair(0)
		must(t, err)
		must(t, p.TX.WaitCall(wait)) // a descriptor that is new to a running ring is signaled at once
		must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 0), frontend.Direct))
		switch err := p.TX.WaitCall(200 * time.Millisecond); {
		case !mute && err != nil:
			t.Errorf("WaitCall: %v", err)
		case mute && !errors.Is(err, os.ErrDeadlineExceeded):
			t.Errorf("WaitCall on a mute device: %v", err)
		case !p.TX.Ring.HasUsed():
			t.Error("the chain was not used")
		}
	}
}

// TestEnded: a back-end that is no more is not waited for, by a pair that another connection began either.
func TestEnded(t *testing.T) {
	path, mem, ended := serve(t, newLoop(1)), memory(t, 32<<20), make(chan struct{})
	c := connect(t, path, mem, frontend.Options{})
	p, err := c.StartPair(0)
	must(t, err)
	echo(t, p, 60)
	c.Release()
	must(t, c.Close())
	c = connect(t, path, mem, frontend.Options{Ended: ended})
	c.Adopt(p)
	_, err = c.StartPair(0)
	must(t, err)
	echo(t, p, 60)
	if _, _, err := p.RecvFrame(300 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("RecvFrame before the end: %v", err)
	}
	close(ended)
	begin := time.Now()
	if _, _, err := p.RecvFrame(wait); !errors.Is(err, frontend.ErrEnded) {
		t.Errorf("RecvFrame after the end: %v", err)
	}
	if took := time.Since(begin); took > wait/2 {
		t.Errorf("the end was noticed after %v", took)
	}
}

// TestReconnect: the front-end keeps its rings and gives them to a new connection.
func TestReconnect_RCN01(t *testing.T) {
	path := serve(t, newLoop(1))
	mem := memory(t, 32<<20)
	c := connect(t, path, mem, frontend.Options{})
	p, err := c.StartPair(0)
	must(t, err)
	for range 3 {
		echo(t, p, 60, 1514)
		c.Release()
		must(t, c.Close())
		c = connect(t, path, mem, frontend.Options{})
		c.Adopt(p)
		_, err = c.StartPair(0)
		must(t, err)
	}
	echo(t, p, 60)
}

// TestServerMode: the back-end dials.
func TestServerMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := frontend.Listen(path)
	must(t, err)
	defer l.Close()
	if _, err := l.Accept(10 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Accept without a back-end: %v", err)
	}
	done := make(chan error)
	go func() {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err == nil {
			err = vhostuser.Serve(context.Background(), conn, newLoop(1), vhostuser.Options{})
		}
		done <- err
	}()
	conn, err := l.Accept(wait)
	must(t, err)
	c := frontend.NewClient(conn, frontend.Options{})
	must(t, c.Negotiate())
	must(t, c.SetMemory(memory(t, 32<<20)))
	p, err := c.StartPair(0)
	must(t, err)
	echo(t, p, 60)
	must(t, c.Close())
	must(t, <-done)
}

func TestMemory(t *testing.T) {
	m := memory(t, 1<<20)
	_, err := m.Add(guestmem.RegionSpec{GPA: 1 << 40, Size: 4096, UVA: 1 << 44, MmapOffset: 8192})
	must(t, err)
	gpa, err := m.Alloc(1, 100, 64)
	must(t, err)
	if gpa != 1<<40 || m.UVA(gpa) != 1<<44 || m.Host(gpa) == 0 || len(m.Bytes(gpa, 4096)) != 4096 {
		t.Errorf("allocated %#x", gpa)
	}
	if next, err := m.Alloc(1, 100, 64); err != nil || next != gpa+128 {
		t.Errorf("second allocation %#x, %v", next, err)
	}
	if _, err := m.Alloc(1, 4096, 1); !errors.Is(err, frontend.ErrNoMemory) {
		t.Errorf("full region: %v", err)
	}
	if m.Bytes(gpa, 4097) != nil || m.Bytes(1<<39, 1) != nil || m.UVA(1<<39) != 0 || m.Host(1<<39) != 0 {
		t.Error("addresses outside the regions were translated")
	}
}
