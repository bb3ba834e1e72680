package cases

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/http"
	"testing"
	"time"

	daemonapi "github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// station is a guest on a switch with its address.
type station struct {
	*guest
	name string
	mac  []byte
	all  []*frontend.Pair
}

// segmentOf serves vm0 on the switch; join adds others.
func segmentOf(t testing.TB, params string, opts frontend.Options, pairs int) (*vhostd, *station) {
	t.Helper()
	d := serve(t, "switch,name=lan"+params, "--queue-pairs", "4")
	s := d.station("vm0", d.path, 1, opts, pairs)
	s.offer()
	return d, s
}

// join adds a guest through the control socket and connects it.
func (d *vhostd) join(number int, params string, opts frontend.Options, pairs int) *station {
	d.t.Helper()
	s := d.joinSilently(number, params, opts, pairs)
	s.offer()
	return s
}

// joinSilently is join for a guest that offers no buffers.
func (d *vhostd) joinSilently(number int, params string, opts frontend.Options, pairs int) *station {
	d.t.Helper()
	name := fmt.Sprint("vm", number-1)
	socket := d.path + "-" + name
	body := fmt.Sprintf(`{"name": %q, "socket": %q, "network": "switch,name=lan%s", "queue-pairs": 4}`, name, socket, params)
	d.command(http.MethodPost, "/v1/guests", body, http.StatusCreated)
	return d.station(name, socket, number, opts, pairs)
}

func (d *vhostd) station(name, socket string, number int, opts frontend.Options, pairs int) *station {
	d.t.Helper()
	mem := memory(d.t, 32<<20)
	c, err := frontend.Connect(socket, mem, opts)
	must(d.t, err)
	d.t.Cleanup(func() { c.Close() })
	s := &station{name: name, mac: []byte{2, 0, 0, 0, 0, byte(number)}}
	for i := range pairs {
		s.all = append(s.all, pair(d.t, c, i))
	}
	s.guest = &guest{t: d.t, d: d, c: c, mem: mem}
	if pairs > 0 {
		s.Pair = s.all[0]
	}
	return s
}

var everybody = []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// to sends a frame of n bytes.
func (s *station) to(dst []byte, n int, seed byte) (frame []byte) {
	s.t.Helper()
	frame = frameOf(n, seed)
	copy(frame, dst)
	copy(frame[6:], s.mac)
	must(s.t, s.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
	must(s.t, s.DrainTx(patience))
	return frame
}

// gets demands one frame, on any pair, and no second one.
func (s *station) gets(want []byte) {
	s.t.Helper()
	var got [][]byte
	eventually(s.t, s.name+" receives the frame", func() bool { got = append(got, s.pending()...); return len(got) > 0 })
	time.Sleep(quiet / 4)
	if got = append(got, s.pending()...); len(got) != 1 || !bytes.Equal(got[0], want) {
		s.t.Errorf("%s received %d frames, want one of %d bytes", s.name, len(got), len(want))
	}
}

// offer offers all free receive buffers.
func (s *station) offer() {
	s.t.Helper()
	for _, p := range s.all {
		_, err := p.PostRx(p.RX.Driver.Size())
		must(s.t, err)
	}
}

// pending takes what was delivered on any pair.
func (s *station) pending() (frames [][]byte) {
	s.t.Helper()
	for _, p := range s.all {
		for {
			_, frame, ok, err := p.TryRecv()
			must(s.t, err)
			if !ok {
				break
			}
			frames = append(frames, bytes.Clone(frame))
		}
	}
	s.offer()
	return frames
}

func (s *station) getsNothing() {
	s.t.Helper()
	if got := s.pending(); len(got) > 0 {
		s.t.Errorf("%s received %d frames that are not for it", s.name, len(got))
	}
}

// switches is the status with all guests and switches.
func (d *vhostd) switches() daemonapi.Status {
	d.t.Helper()
	var s daemonapi.Status
	d.get("/v1/status", &s)
	return s
}

// TestSW01_LearntUnicast: a third guest sees nothing of what two others say to each other, also when one of them leaves.
func TestSW01_LearntUnicast(t *testing.T) {
	d, a := segmentOf(t, "", ordinary(), 1)
	b, c := d.join(2, "", ordinary(), 1), d.join(3, "", ordinary(), 1)
	f := a.to(b.mac, 60, 1)
	b.gets(f)
	c.gets(f) // nobody knew B
	a.gets(b.to(a.mac, 60, 2))
	for i := range 20 {
		b.gets(a.to(b.mac, 60+i, byte(i)))
	}
	if s := d.switches().Switches; len(s) != 1 || s[0].Name != "lan" || s[0].Ports != 3 || s[0].Stations != 2 {
		t.Errorf("switches in the status: %+v", s)
	}
	must(t, b.c.Close())
	eventually(t, "B is disconnected", func() bool { return !d.switches().Guests[1].Connected })
	a.to(b.mac, 60, 3)
	d.command(http.MethodDelete, "/v1/guests/vm1", "", http.StatusNoContent)
	a.to(b.mac, 60, 4)
	c.getsNothing()
	if n := d.ring(1).Drops["port_station_down"]; n != 2 {
		t.Errorf("%d frames lost for a station that left, want 2", n)
	}
	c.gets(a.to(c.mac, 60, 5))
}

// TestSW01_PinnedAddresses: with a pinned address each, nobody sees foreign frames from the start, and nobody can pose as another.
func TestSW01_PinnedAddresses(t *testing.T) {
	pin := func(n int) string { return fmt.Sprintf(",mac=02:00:00:00:00:%02x", n) }
	d, a := segmentOf(t, pin(1), ordinary(), 1)
	b, c := d.join(2, pin(2), ordinary(), 1), d.join(3, pin(3), ordinary(), 1)
	b.gets(a.to(b.mac, 60, 1))
	a.to([]byte{2, 0, 0, 0, 0, 99}, 60, 1)
	c.mac = b.mac // poses as B
	c.to(everybody, 60, 2)
	b.gets(a.to(b.mac, 60, 3))
	c.getsNothing()
	a.getsNothing()
	if n := d.lost("vm2", "port_foreign_source"); n != 1 {
		t.Errorf("%d frames with a foreign source lost, want 1", n)
	}
	body := fmt.Sprintf(`{"name": "vm9", "socket": %q, "network": "switch,name=lan%s"}`, d.path+"9", pin(2))
	d.command(http.MethodPost, "/v1/guests", body, http.StatusInternalServerError)
}

// lost is how many frames of a guest were dropped for the reason.
func (d *vhostd) lost(guest, reason string) (n uint64) {
	d.t.Helper()
	var s daemonapi.Stats
	d.get("/v1/stats", &s)
	for _, g := range s.Guests {
		for _, r := range g.Rings {
			if g.Name == guest {
				n += r.Drops[reason]
			}
		}
	}
	return n
}

// TestSW03_BroadcastsArriveOnce: at every other guest, whatever its number of queues, and not at the sender.
func TestSW03_BroadcastsArriveOnce(t *testing.T) {
	d, a := segmentOf(t, "", ordinary(), 4)
	b, c := d.join(2, "", ordinary(), 4), d.join(3, "", ordinary(), 1)
	for i, dst := range [][]byte{everybody, {0x33, 0x33, 0xff, 0, 0, 1}, {1, 0, 0x5e, 0, 0, 251}} {
		f := a.to(dst, 70, byte(i))
		b.gets(f)
		c.gets(f)
	}
	a.getsNothing()
}

// TestOFF01_SwitchUnfinishedChecksums: each receiver of one frame gets it in the form that it can take.
func TestOFF01_SwitchUnfinishedChecksums(t *testing.T) {
	d, a := segmentOf(t, "", offloading(0), 1)
	full, without := d.join(3, "", offloading(canReceive), 1), d.join(4, "", offloading(0), 1)
	for _, s := range shapes(text(501)) {
		frame, _ := s.frame()
		must(t, a.SendTx(s.marks(0), frame, frontend.Direct)) // for a station that nobody knows
		hdr, got := full.recv()
		if hdr.NumBuffers = 0; hdr != s.marks(0) || !bytes.Equal(got, frame) {
			t.Errorf("%v: header %+v with GUEST_CSUM, want %+v and the frame as it was sent", s, hdr, s.marks(0))
		}
		hdr, got = without.recv()
		if want := (virtio.NetHdr{NumBuffers: 1}); hdr != want || !bytes.Equal(got, s.finished()) {
			t.Errorf("%v: header %+v without GUEST_CSUM, the checksum is not complete", s, hdr)
		}
	}
}

// TestOFF03_SwitchLargeFrames: one receiver gets a large frame whole, another one its segments, tagged or not.
func TestOFF03_SwitchLargeFrames(t *testing.T) {
	d, a := segmentOf(t, "", offloading(0), 1)
	full, without := d.join(3, "", offloading(canReceive), 1), d.join(4, "", offloading(0), 1)
	for _, s := range []segment{{payload: text(60000)}, {v6: true, payload: text(60000)}, {tags: 1, payload: text(20001)}, {v6: true, tags: 2, payload: text(20001)}} {
		frame, _ := s.frame()
		must(t, a.SendTx(s.marks(mss), frame, frontend.Chained))
		hdr, got := full.recv()
		if hdr.NumBuffers = 0; hdr != s.marks(mss) || !bytes.Equal(got, frame) {
			t.Errorf("%v: header %+v, want %+v and the frame as it was sent", s, hdr, s.marks(mss))
		}
		without.segments(s)
	}
	unknown := frameOf(200, 9) // tags of a kind that nobody knows
	copy(unknown[12:], []byte{0x91, 0x00, 0, 1, 0x81, 0x00, 0, 2})
	must(t, a.SendTx(virtio.NetHdr{}, unknown, frontend.Direct))
	full.gets(unknown)
	without.gets(unknown)
}

// TestPERF03_StoppedGuest: a guest that takes nothing, and then is gone, holds up nobody, and its frames give their memory back.
func TestPERF03_StoppedGuest(t *testing.T) {
	d, a := segmentOf(t, "", ordinary(), 1)
	b := d.join(2, "", ordinary(), 1)
	pages := d.switches().ArenaPages
	stopped := d.join(3, "", ordinary(), 1)
	stopped.to(everybody, 60, 1)
	a.recv()
	b.recv()
	// The ring holds buffers for 256 frames, nobody posts more.
	frame := frameOf(600, 1)
	for i := range rounds(2000, 100_000) {
		copy(frame, stopped.mac)
		if i%10 == 0 {
			copy(frame, everybody)
		}
		copy(frame[6:], a.mac)
		must(t, a.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
		must(t, a.DrainTx(patience))
		if i%10 == 0 {
			b.recv()
		}
		if i == rounds(1500, 90_000) {
			must(t, stopped.c.Close())
		}
	}
	begin := time.Now()
	a.gets(b.to(a.mac, 60, 3))
	b.gets(a.to(b.mac, 60, 4))
	soon(t, "two frames arrived", begin)
	eventually(t, "the stopped guest's frames are released", func() bool { return d.switches().ArenaPages <= pages+512 })
	if d.lost("vm2", "port_backlog_full")+d.lost("vm2", "port_memory_full") == 0 {
		t.Error("the stopped guest lost no frames for lack of room")
	}
}

// TestB21_FloodingGuest: a guest that sends groups without end, on the worker of the others, leaves them their turns and their memory.
func TestB21_FloodingGuest(t *testing.T) {
	d, a := segmentOf(t, ",mac=02:00:00:00:00:01", ordinary(), 1)
	b, evil := d.join(2, ",mac=02:00:00:00:00:02", ordinary(), 1), d.join(3, "", ordinary(), 1)
	pages := d.switches().ArenaPages
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		frame := frameOf(1400, 1)
		copy(frame, everybody)
		for i := 0; ; i++ {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			frame[6], frame[10], frame[11] = 2, byte(i>>8), byte(i) // and from ever new addresses
			if err := first(func() error { return evil.SendTx(virtio.NetHdr{}, frame, frontend.Direct) }, func() error { return evil.DrainTx(patience) }); err != nil {
				stopped <- err
				return
			}
		}
	}()
	// Frames of the flood arrive as well; they are thrown away.
	next := func(s *station, want []byte) {
		t.Helper()
		begin := time.Now()
		eventually(t, s.name+" receives its frame", func() bool {
			for _, frame := range s.pending() {
				if bytes.Equal(frame, want) {
					return true
				}
			}
			return false
		})
		soon(t, "a frame arrived beside the flood", begin)
	}
	for i := range rounds(200, 5000) {
		next(b, a.to(b.mac, 60, byte(i)))
		next(a, b.to(a.mac, 60, byte(i)))
	}
	begin := time.Now()
	s := d.switches()
	soon(t, "the status was answered beside the flood", begin)
	if n := s.Switches[0].Stations; n > 128 {
		t.Errorf("%d stations of one guest are known", n)
	}
	if s.ArenaPages > pages+8192 {
		t.Errorf("%d pages in use, were %d", s.ArenaPages, pages)
	}
	close(stop)
	must(t, <-stopped)
}

// TestMQ03_SwitchServesEnabledPairs: all flows reach the only pair that is enabled, and each pair gets its share once it is.
func TestMQ03_SwitchServesEnabledPairs(t *testing.T) {
	const wanted = 600
	d, a := segmentOf(t, "", ordinary(), 1)
	b := d.join(2, "", ordinary(), 1)
	b.to(everybody, 60, 1)
	a.recv()
	flood := func() (perPair []int) {
		perPair = make([]int, len(b.all))
		seen := map[uint16]bool{}
		for flow := range wanted {
			frame, _ := segment{udp: true, payload: text(20)}.frame()
			copy(frame, b.mac)
			copy(frame[6:], a.mac)
			binary.BigEndian.PutUint16(frame[34:], uint16(flow))
			must(t, a.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
			must(t, a.DrainTx(patience))
		drain:
			for i, p := range b.all {
				for {
					_, got, ok, err := p.TryRecv()
					must(t, err)
					if !ok {
						continue drain
					}
					perPair[i]++
					seen[binary.BigEndian.Uint16(got[34:])] = true
					_, err = p.PostRx(64)
					must(t, err)
				}
			}
		}
		eventually(t, "all flows arrive", func() bool {
			for i, p := range b.all {
				if _, got, ok, err := p.TryRecv(); err == nil && ok {
					perPair[i]++
					seen[binary.BigEndian.Uint16(got[34:])] = true
				}
			}
			return len(seen) == wanted
		})
		return perPair
	}
	flood()
	late := pair(t, b.c, 2)
	_, err := late.PostRx(late.RX.Ring.Size())
	must(t, err)
	b.all = append(b.all, late)
	if n := flood(); n[0] < wanted/4 || n[1] < wanted/4 {
		t.Errorf("flows on the two pairs: %v", n)
	}
	must(t, enable(b.c.Conn, false, 4, 5))
	must(t, b.c.Sync())
	if n := flood(); n[1] != 0 {
		t.Errorf("%d frames on a disabled pair", n[1])
	}
}
