package hostile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// TestChaos: front-ends that send messages of all features in any order, with guests that leave rubbish in their rings, cost the good
// guest nothing but time, and leave nothing behind.
func TestChaos(t *testing.T) {
	seed := rand.Uint64()
	if text := os.Getenv("VHOSTD_CHAOS_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 0, 64)
		must(t, err)
	}
	for_ := 4 * time.Second
	if os.Getenv("VHOSTD_LONG") == "1" {
		for_ = 3 * time.Minute
	}
	t.Logf("seed %d", seed)
	state := t.TempDir()
	t.Setenv("VHOSTD_SANDBOX_TRAP", "1")
	d := serveGuests(t, true, []string{
		"{name: good, socket: %s/good, network: echo, queue-pairs: 4}",
		"{name: evil, socket: %s/evil, network: echo, queue-pairs: 4, mac: 02:00:00:00:00:01}",
	}, "state-dir: "+state, "log-level: error")
	_, good := d.guest("good", frontend.Options{})
	ping(t, good)
	files := d.files()
	rng, lives := rand.New(rand.NewPCG(seed, 1)), 0
	var longest time.Duration
	for end := time.Now().Add(for_); time.Now().Before(end); lives++ {
		c := &chaos{rng: rng, path: filepath.Join(d.dir, "evil")}
		c.live()
		if d.Ended() {
			t.Fatalf("vhostd ended in life %d", lives)
		}
		longest = max(longest, ping(t, good))
	}
	t.Logf("%d lives, the good guest waited for up to %v", lives, longest)
	if longest > time.Second {
		t.Errorf("the good guest waited for %v", longest)
	}
	_, evil := d.guest("evil", frontend.Options{})
	ping(t, evil)
	for end := time.Now().Add(patience); d.files() > files+8; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d descriptors are open, %d were", d.files(), files)
		}
	}
}

// files is how many descriptors the program has open.
func (d *vhostd) files() int {
	d.t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.PID()))
	must(d.t, err)
	return len(entries)
}

// chaos is one life of a front-end that does not know what it does.
type chaos struct {
	rng  *rand.Rand
	path string

	mem      *frontend.Memory
	client   *frontend.Client
	pairs    []*frontend.Pair
	control  *frontend.Queue
	inflight *frontend.Inflight
	iova     uint64
	open     []int // descriptors of the front-end
}

// one returns true one time out of n.
func (c *chaos) one(n int) bool { return c.rng.IntN(n) == 0 }

func (c *chaos) live() {
	var err error
	if c.mem, err = frontend.NewMemory(8<<20, 8<<20); err != nil {
		return
	}
	defer c.mem.Close()
	defer func() {
		for _, fd := range c.open {
			unix.Close(fd)
		}
	}()
	opts := frontend.Options{
		RingSize: 64, Order: frontend.Order(c.rng.IntN(5)), NeedReply: true, RxBuf: 512, Region: c.rng.IntN(2),
		Features: c.features(), RxLayout: frontend.Layout(c.rng.IntN(3)),
	}
	if c.one(2) {
		c.iova = frontend.IOVABase
		rng := rand.New(rand.NewPCG(c.rng.Uint64(), 1))
		opts.IOMMU = &frontend.IOMMU{Answer: func(vhostuser.IOTLBMsg) (time.Duration, bool) {
			return time.Duration(rng.IntN(3)) * 100 * time.Microsecond, rng.IntN(16) > 0
		}}
		if c.one(4) {
			opts.IOMMU.Perm = uint8(1 + c.rng.IntN(2))
		}
	}
	if c.client, err = frontend.Connect(c.path, c.mem, opts); err != nil {
		return
	}
	defer c.client.Close()
	c.client.Timeout = patience
	if c.one(2) {
		c.shareInflight()
	}
	for i := range 1 + c.rng.IntN(2) {
		p, err := c.client.StartPair(i)
		if err != nil {
			break
		}
		c.pairs = append(c.pairs, p)
	}
	if c.one(2) {
		c.control, _ = c.client.StartControl(4)
	}
	for range 10 + c.rng.IntN(60) {
		c.traffic()
		step := steps[c.rng.IntN(len(steps))]
		if err := step(c); gone(err) {
			return
		}
	}
}

// gone reports whether the connection ended.
func gone(err error) bool {
	var refused *frontend.RefusedError
	return err != nil && !errors.As(err, &refused)
}

func (c *chaos) features() virtio.Features {
	f := virtio.FVersion1 | virtio.FRingIndirectDesc
	for _, bit := range []virtio.Features{
		virtio.FNetMrgRxBuf, virtio.FNetMQ, virtio.FRingPacked, virtio.FInOrder, virtio.FRingEventIdx, virtio.FVhostLogAll,
		virtio.FNetCtrlVQ | virtio.FNetCtrlRX | virtio.FNetCtrlVLAN | virtio.FNetCtrlMACAddr,
	} {
		if c.one(2) {
			f |= bit
		}
	}
	return f
}

// traffic moves frames, and now and then leaves rubbish.
func (c *chaos) traffic() {
	for _, p := range c.pairs {
		_, _ = p.PostRx(8)
		for range 4 {
			_ = p.Stage(virtio.NetHdr{}, make([]byte, 60+c.rng.IntN(400)), frontend.Layout(c.rng.IntN(3)))
		}
		_ = p.TX.Flush()
		_, _ = p.ReapTx()
		for range 8 {
			if _, _, ok, err := p.TryRecv(); !ok || err != nil {
				break
			}
		}
		if p.TX.Ring != nil && c.one(200) {
			p.TX.Ring.PokeAvailIdx(uint16(c.rng.Uint32()))
			_ = p.TX.Kick()
		}
	}
	if c.control != nil && c.one(3) {
		mac := []byte{2, 0, 0, 0, 0, byte(c.rng.IntN(3))}
		_, _, _ = c.control.Command(virtio.CtrlMAC, virtio.CtrlMACAddrSet, mac, frontend.Layout(c.rng.IntN(3)), time.Millisecond)
		_, _, _ = c.control.Command(virtio.CtrlMQ, virtio.CtrlMQPairsSet, []byte{byte(1 + c.rng.IntN(4)), 0}, frontend.Direct, time.Millisecond)
	}
	if c.one(20) {
		at := c.rng.Uint64N(1 << 20)
		for _, r := range c.mem.Regions {
			binary.LittleEndian.PutUint64(c.mem.Bytes(r.GPA+at&^7, 8), c.rng.Uint64())
		}
	}
}

// keep has the descriptor closed when the life ends.
func (c *chaos) keep(fd int) int {
	c.open = append(c.open, fd)
	return fd
}

func (c *chaos) memfd(size int64) int {
	fd, err := unix.MemfdCreate("chaos", unix.MFD_CLOEXEC)
	if err != nil {
		panic(err)
	}
	_ = unix.Ftruncate(fd, size)
	return c.keep(fd)
}

func (c *chaos) eventfd() int {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		panic(err)
	}
	return c.keep(fd)
}

func (c *chaos) socket(kind int) [2]int {
	pair, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	c.keep(pair[0])
	c.keep(pair[1])
	return pair
}

// queue is one that is started, or was.
func (c *chaos) queue() *frontend.Queue {
	switch i := c.rng.IntN(5); {
	case len(c.pairs) == 0, i == 0 && c.control != nil:
		return c.control
	case i < 3:
		return c.pairs[c.rng.IntN(len(c.pairs))].TX
	default:
		return c.pairs[c.rng.IntN(len(c.pairs))].RX
	}
}

// address is that of the queue as SET_VRING_ADDR says it, with or without a log.
func (c *chaos) address(q *frontend.Queue) vhostuser.VringAddr {
	a := q.Addr()
	if c.iova != 0 && c.client.Features.Has(virtio.FAccessPlatform) {
		a = q.IOVAAddr()
	}
	a.Flags = uint32(c.rng.IntN(2))
	if c.one(8) {
		a.Log = c.rng.Uint64() >> c.rng.IntN(64) &^ 3
	}
	return a
}

func (c *chaos) shareInflight() error {
	if c.inflight == nil || c.one(3) {
		in, err := c.client.GetInflightFD(uint16(1+c.rng.IntN(9)), 64)
		if err != nil {
			return err
		}
		c.keep(in.FD)
		c.inflight = &in
	}
	in := *c.inflight
	if c.one(4) {
		in = frontend.Inflight{InflightDesc: vhostuser.InflightDesc{Size: 1 << 20, Queues: 4, QueueSize: 64}, FD: c.memfd(1 << 20)}
		rubbish := make([]byte, 1<<16)
		for i := 0; i < len(rubbish); i += 2 {
			binary.LittleEndian.PutUint16(rubbish[i:], uint16(c.rng.IntN(80)))
		}
		for i := range 4 {
			binary.LittleEndian.PutUint32(rubbish[i*((16+16*64+63)&^63)+8:], 1|64<<16)
		}
		_, _ = unix.Pwrite(in.FD, rubbish, 0)
		c.inflight = &in
	}
	return c.client.SetInflightFD(in)
}
