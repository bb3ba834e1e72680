package attach

import (
	"context"
	"encoding/binary"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

const patience = 20 * time.Second

// fake is a back-end that does what the test says, and by default what is right. It serves split rings.
type fake struct {
	t        *testing.T
	path     string
	features virtio.Features
	protocol vhostuser.ProtocolFeatures
	config   []byte
	queues   uint64
	// script, if set, sees each message first and returns true if it has taken care of it; an error ends the connection.
	script func(c *frontend.Conn, m frontend.Reply) (done, hangUp bool)

	mu       sync.Mutex
	messages []vhostuser.Request
	table    guestmem.RegionSpec
	memFD    int
	mem      []byte
	rings    map[int]*fakeRing
	running  chan struct{} // closed when GET_FEATURES comes after the kicks: the front-end's last word before it starts
	ended    chan struct{} // closed when the connection is over
}

// fakeRing is the device's side of one ring.
type fakeRing struct {
	f                 *fake
	size              uint32
	desc, avail, used uint64 // offsets in the memory
	kick, call, fail  int
	next, usedIdx     uint16
}

const allFeatures = ringWishes | sendWishes | recvWishes

func newFake(t *testing.T) *fake {
	t.Helper()
	return &fake{t: t, path: filepath.Join(t.TempDir(), "sock"), features: allFeatures, protocol: protocolWishes, queues: 4, memFD: -1,
		config: virtio.NetConfig{MAC: [6]byte{0x52, 0x54, 0, 1, 2, 3}, MaxQueuePairs: 4, MTU: 1400}.Encode()}
}

// listen serves one connection.
func (f *fake) listen() {
	f.t.Helper()
	f.rings, f.running, f.ended = map[int]*fakeRing{}, make(chan struct{}), make(chan struct{})
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: f.path, Net: "unix"})
	if err != nil {
		f.t.Fatal(err)
	}
	done := make(chan struct{})
	var conn *frontend.Conn
	go func() {
		defer close(done)
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		conn = frontend.NewConn(c)
		conn.Timeout = time.Minute
		f.serve(conn)
		conn.Close()
	}()
	ended := f.ended
	f.t.Cleanup(func() {
		l.Close()
		select {
		case <-done:
		case <-time.After(patience):
			f.t.Error("the front-end did not close the connection")
			conn.Close()
			<-done
		}
		f.release(ended)
	})
}

func (f *fake) release(ended chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mem != nil {
		unix.Munmap(f.mem)
		unix.Close(f.memFD)
		f.mem = nil
	}
	for _, r := range f.rings {
		closeAll([]int{r.kick, r.call, r.fail})
	}
	f.rings = map[int]*fakeRing{}
}

func (f *fake) serve(c *frontend.Conn) {
	defer close(f.ended)
	for {
		m, err := c.Recv(0)
		if err != nil {
			return
		}
		f.mu.Lock()
		f.messages = append(f.messages, m.Request)
		f.mu.Unlock()
		if f.script != nil {
			done, hangUp := f.script(c, m)
			if hangUp {
				closeAll(m.FDs)
				return
			}
			if done {
				closeAll(m.FDs)
				continue
			}
		}
		f.handle(c, m)
	}
}

func reply(c *frontend.Conn, m frontend.Reply, payload []byte) {
	_ = c.Send(m.Request, vhostuser.FlagVersion|vhostuser.FlagReply, payload) // the front-end may be gone
}

func replyU64(c *frontend.Conn, m frontend.Reply, v uint64) {
	reply(c, m, binary.LittleEndian.AppendUint64(nil, v))
}

func (f *fake) handle(c *frontend.Conn, m frontend.Reply) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch m.Request {
	case vhostuser.ReqGetFeatures:
		replyU64(c, m, uint64(f.features))
		if len(f.rings) > 0 {
			select {
			case <-f.running:
			default:
				close(f.running)
			}
		}
		return
	case vhostuser.ReqGetProtocolFeatures:
		replyU64(c, m, uint64(f.protocol))
		return
	case vhostuser.ReqGetQueueNum:
		replyU64(c, m, f.queues)
		return
	case vhostuser.ReqGetConfig:
		reply(c, m, append(m.Payload[:12:12], f.config[:binary.LittleEndian.Uint32(m.Payload[4:])]...))
		return
	case vhostuser.ReqGetVringBase:
		v := vhostuser.DecodeVringState(m.Payload)
		reply(c, m, vhostuser.VringState{Index: v.Index, Num: 0}.Append(nil))
		return
	case vhostuser.ReqSetMemTable:
		f.share(m)
	default:
		f.setRing(m)
	}
	if m.Flags&vhostuser.FlagNeedReply != 0 {
		replyU64(c, m, 0)
	}
}

func (f *fake) share(m frontend.Reply) {
	le := binary.LittleEndian
	f.table = guestmem.RegionSpec{GPA: le.Uint64(m.Payload[8:]), Size: le.Uint64(m.Payload[16:]), UVA: le.Uint64(m.Payload[24:])}
	var err error
	f.memFD = m.FDs[0]
	if f.mem, err = unix.Mmap(f.memFD, 0, int(f.table.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		f.t.Error(err)
	}
}

func (f *fake) ring(i uint32) *fakeRing {
	r := f.rings[int(i)]
	if r == nil {
		r = &fakeRing{f: f, kick: -1, call: -1, fail: -1}
		f.rings[int(i)] = r
	}
	return r
}

func (f *fake) setRing(m frontend.Reply) {
	le := binary.LittleEndian
	switch m.Request {
	case vhostuser.ReqSetVringNum:
		f.ring(le.Uint32(m.Payload)).size = le.Uint32(m.Payload[4:])
	case vhostuser.ReqSetVringAddr:
		r := f.ring(le.Uint32(m.Payload))
		for i, to := range [...]*uint64{&r.desc, &r.used, &r.avail} {
			*to = le.Uint64(m.Payload[8+8*i:]) - f.table.UVA
		}
	case vhostuser.ReqSetVringKick:
		f.ring(le.Uint32(m.Payload)).kick = m.FDs[0]
	case vhostuser.ReqSetVringCall:
		f.ring(le.Uint32(m.Payload)).call = m.FDs[0]
	case vhostuser.ReqSetVringErr:
		f.ring(le.Uint32(m.Payload)).fail = m.FDs[0]
	}
}

// take waits for the next available chain and returns its head and its first buffer.
func (r *fakeRing) take() (head uint16, data []byte) {
	r.f.t.Helper()
	for end := time.Now().Add(patience); !r.available(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			r.f.t.Fatal("nothing on the ring")
		}
	}
	return r.pop()
}

func (r *fakeRing) available() bool { return binary.LittleEndian.Uint16(r.f.mem[r.avail+2:]) != r.next }

func (r *fakeRing) pop() (head uint16, data []byte) {
	le, mem := binary.LittleEndian, r.f.mem
	head = le.Uint16(mem[r.avail+4+2*uint64(r.next%uint16(r.size)):])
	r.next++
	d := mem[r.desc+16*uint64(head):]
	at := le.Uint64(d) - r.f.table.GPA
	return head, mem[at : at+uint64(le.Uint32(d[8:]))]
}

// use writes a used entry; publish shows it.
func (r *fakeRing) use(id, length uint32) {
	e := r.f.mem[r.used+4+8*uint64(r.usedIdx%uint16(r.size)):]
	binary.LittleEndian.PutUint32(e, id)
	binary.LittleEndian.PutUint32(e[4:], length)
	r.usedIdx++
}

func (r *fakeRing) publish() {
	binary.LittleEndian.PutUint16(r.f.mem[r.used+2:], r.usedIdx)
	ringBell(r.call)
}

var one = [8]byte{1}

func ringBell(fd int) { _, _ = unix.Write(fd, one[:]) }

// deliver gives the front-end a frame in buffers of the given sizes, of which the first begins with the header.
func (r *fakeRing) deliver(header virtio.NetHdr, frame []byte, sizes ...int) {
	b := make([]byte, virtio.NetHdrLen, virtio.NetHdrLen+len(frame))
	header.Encode(b)
	b = append(b, frame...)
	for _, n := range sizes {
		head, data := r.take()
		r.use(uint32(head), uint32(copy(data, b[:n])))
		b = b[n:]
	}
	r.publish()
}

// attached is a session with the fake whose tap is a packet socket, the other end of which is the namespace.
type attached struct {
	*session
	namespace int
	counts    *traffic
	ended     chan error
	leave     func() // ends the wait for the connection's end
}

// attach starts a session. The socket pair stands for the tap: a message is a frame with its header.
func (f *fake) attach(change func(*Options)) *attached {
	f.t.Helper()
	opts := Options{Socket: f.path, Netns: "none"}
	if change != nil {
		change(&opts)
	}
	opts, err := opts.withDefaults()
	if err != nil {
		f.t.Fatal(err)
	}
	s, err := dial(f.t.Context(), &opts)
	if err != nil {
		f.t.Fatal(err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		f.t.Fatal(err)
	}
	a := &attached{session: s, namespace: fds[1], counts: &traffic{}, ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(f.t.Context())
	if err := s.start(fds[:1], 1500, []*traffic{a.counts}); err != nil {
		f.t.Error(err)
	}
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		a.ended <- s.wait(ctx)
	}()
	a.leave = func() {
		cancel()
		<-waited
	}
	f.t.Cleanup(func() {
		a.leave()
		if err := s.close(); err != nil {
			f.t.Error(err)
		}
		closeAll(fds[:])
	})
	select {
	case <-f.running:
	case <-time.After(patience):
		f.t.Fatal("the rings do not run")
	}
	return a
}

// frame waits for the next frame that the namespace gets.
func (a *attached) frame(t *testing.T) (virtio.NetHdr, []byte) {
	t.Helper()
	b := make([]byte, 1<<17)
	fds := []unix.PollFd{{Fd: int32(a.namespace), Events: unix.POLLIN}}
	if _, err := unix.Poll(fds, int(patience/time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	n, err := unix.Read(a.namespace, b)
	if err != nil {
		t.Fatalf("no frame: %v", err)
	}
	var h virtio.NetHdr
	h.Decode(b[:a.features.NetHdrLen()])
	return h, b[a.features.NetHdrLen():n]
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}
