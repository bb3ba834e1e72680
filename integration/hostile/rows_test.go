package hostile

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/control"
	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// row is one of the hostile inputs that docs/testing.md lists.
type row struct {
	id, input string
	play      func(a *attack)
}

// rows are all of them. A1 to A27 and B1 to B32 were flaws of comparable programs, C1 to C88 follow from the protocol.
func rows() []row {
	return slices.Concat(framingRows, memoryRows, inflightRows, logRows, translationRows, ringRows, kickRows, chainRows, brokenRows,
		packetRows, controlRows, stateRows, processRows)
}

// TestRows plays every row on the guest evil of one program with the race detector. Beside what the row demands, the good guest is
// served all the time, and afterwards no descriptor, mapping of guest memory or goroutine of the attack is left.
func TestRows(t *testing.T) {
	t.Setenv("VHOSTD_SANDBOX_TRAP", "1")
	d := serveGuests(t, true, []string{
		"{name: good, socket: %s/good, network: echo, queue-pairs: 1}",
		"{name: evil, socket: %s/evil, network: echo, queue-pairs: 4, mac: 02:00:00:00:00:01}",
		"{name: silent, socket: %s/silent, network: echo}",
		"{name: cut, socket: %s/cut, network: echo}",
		"{name: deaf, socket: %s/deaf, network: echo}",
		"{name: state, socket: %s/state, network: echo}",
	})
	_, good := d.guest("good", frontend.Options{})
	w := watchGood(good)
	t.Cleanup(w.end)
	d.settled("")
	idle := d.held()
	slow := startSlow(t, d)
	checked := startTransfer(t, slow["state"])
	base := d.held()
	for _, r := range rows() {
		t.Run(r.id+"_"+r.input, func(t *testing.T) {
			sub := *d
			sub.t = t
			a := &attack{vhostd: &sub, t: t, slow: slow, checked: checked}
			t.Cleanup(func() { a.after(w, base) })
			w.restart()
			a.drops0 = a.allDrops()
			r.play(a)
		})
		if d.Ended() {
			t.Fatalf("vhostd ended at row %s:\n%s", r.id, d.Output())
		}
	}
	for _, c := range slow {
		c.Close()
	}
	sub := *d
	(&attack{vhostd: &sub, t: t}).after(w, idle)
}

// after demands what holds for every row.
func (a *attack) after(w *watch, base held) {
	a.t.Helper()
	a.settled("evil")
	w.check(a.t)
	if a.Ended() {
		a.t.Fatalf("vhostd ended:\n%s", a.Output())
	}
	a.flat(base)
	for _, bad := range []string{"DATA RACE", "panic:", "fatal error:"} {
		if strings.Contains(a.Output(), bad) {
			a.t.Fatalf("%s in the output of vhostd", bad)
		}
	}
}

// watch keeps the good guest sending to itself and measures how long its frames take.
type watch struct {
	mu      sync.Mutex
	begun   time.Time // of the frame under way
	longest time.Duration
	count   int
	err     error
	stop    atomic.Bool
	done    chan struct{}
}

func watchGood(p *frontend.Pair) *watch {
	w := &watch{done: make(chan struct{})}
	go func() {
		defer close(w.done)
		for ; !w.stop.Load(); time.Sleep(3 * time.Millisecond) {
			w.mu.Lock()
			w.begun = time.Now()
			w.mu.Unlock()
			err := roundTrip(p, bytes.Repeat([]byte{3}, 100))
			w.mu.Lock()
			w.longest, w.err = max(w.longest, time.Since(w.begun)), err
			w.count++
			w.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return w
}

func (w *watch) end() {
	w.stop.Store(true)
	<-w.done
}

func (w *watch) restart() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.longest, w.count = 0, 0
}

// check demands that the good guest was served since restart. A machine that is busy with other tests may hold up a frame, too.
func (w *watch) check(t testing.TB) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		w.mu.Lock()
		longest, count, err := w.longest, w.count, w.err
		w.mu.Unlock()
		switch {
		case err != nil:
			t.Fatalf("the good guest: %v", err)
		case longest > 3*time.Second:
			t.Fatalf("the good guest waited for %v", longest)
		case count > 1:
			return
		case time.Now().After(end):
			t.Fatal("the good guest is not served")
		}
	}
}

// held is what the program holds for front-ends.
type held struct{ files, memory, goroutines int }

func (d *vhostd) held() (h held) {
	d.t.Helper()
	h.files = d.files()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", d.PID()))
	must(d.t, err)
	h.memory = bytes.Count(maps, []byte("/memfd:")) + bytes.Count(maps, []byte("/anon_hugepage"))
	metrics, err := control.Get(context.Background(), filepath.Join(d.dir, "control"), "/metrics")
	must(d.t, err)
	for line := range strings.Lines(string(metrics)) {
		_, _ = fmt.Sscanf(line, "go_goroutines %d", &h.goroutines)
	}
	if h.goroutines == 0 {
		d.t.Fatal("no count of goroutines in the metrics")
	}
	return h
}

// flat demands that no more is held than base, once what was under way has ended.
func (d *vhostd) flat(base held) {
	d.t.Helper()
	var now held
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		now = d.held()
		if now.files <= base.files && now.memory <= base.memory && now.goroutines <= base.goroutines {
			return
		}
	}
	d.t.Errorf("%+v is held, it was %+v", now, base)
}

func (d *vhostd) get(url string, v any) {
	d.t.Helper()
	body, err := control.Get(context.Background(), filepath.Join(d.dir, "control"), url)
	must(d.t, err)
	must(d.t, json.Unmarshal(body, v))
}

// status is a guest's condition.
func (d *vhostd) status(name string) daemon.GuestStatus {
	d.t.Helper()
	var s daemon.Status
	d.get("/v1/status", &s)
	for _, g := range s.Guests {
		if g.Name == name {
			return g
		}
	}
	d.t.Fatalf("%s is not in the status", name)
	return daemon.GuestStatus{}
}

// settled waits until the named guest has no front-end.
func (d *vhostd) settled(name string) {
	d.t.Helper()
	if name != "" {
		eventually(d.t, name+" has no front-end", func() bool { return !d.status(name).Connected })
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// startSlow connects the front-ends of the rows that wait for a time limit of ten seconds: it passes while other rows are played.
func startSlow(t *testing.T, d *vhostd) map[string]*frontend.Conn {
	slow := map[string]*frontend.Conn{}
	for _, name := range []string{"silent", "cut", "deaf", "state"} {
		c, err := frontend.Dial(filepath.Join(d.dir, name))
		must(t, err)
		t.Cleanup(func() { c.Close() })
		slow[name] = c
	}
	must(t, slow["silent"].SendRaw(message(vhostuser.ReqSetFeatures, make([]byte, 8))[:7]))
	must(t, slow["cut"].SendRaw(message(vhostuser.ReqSetVringAddr, make([]byte, 40))[:30]))
	slow["deaf"].Timeout = time.Minute
	go func() {
		for slow["deaf"].Send(vhostuser.ReqGetFeatures, vhostuser.FlagVersion, nil) == nil { // both directions are full, soon
		}
	}()
	eventually(t, "the slow front-ends are connected", func() bool {
		return d.status("silent").Connected && d.status("cut").Connected && d.status("deaf").Connected
	})
	return slow
}

// startTransfer begins one of device state over a pipe that stays empty.
func startTransfer(t *testing.T, c *frontend.Conn) (checked <-chan error) {
	r, w, err := os.Pipe()
	must(t, err)
	must(t, c.SetProtocolFeatures(vhostuser.ProtoDeviceState|vhostuser.ProtoReplyAck))
	must(t, c.SetDeviceStateFD(vhostuser.StateLoad, int(r.Fd())))
	r.Close()
	result := make(chan error, 1)
	go func() {
		defer w.Close()
		c.Timeout = 2 * patience
		result <- c.CheckDeviceState()
	}()
	return result
}

// message is one as it travels.
func message(req vhostuser.Request, payload []byte) []byte {
	h := vhostuser.Header{Request: req, Flags: vhostuser.FlagVersion, Size: uint32(len(payload))}
	return append(h.Append(nil), payload...)
}

// roundTrip sends a frame through the echo network and wants it back unharmed, and nothing before it.
func roundTrip(p *frontend.Pair, frame []byte) error {
	if _, err := p.PostRx(1); err != nil {
		return err
	}
	if err := p.SendTx(virtio.NetHdr{}, frame, frontend.Direct); err != nil {
		return err
	}
	_, got, err := p.RecvFrame(patience)
	if err != nil {
		return fmt.Errorf("the frame did not come back: %w", err)
	}
	if !bytes.Equal(got, swapped(frame)) {
		return fmt.Errorf("another frame came back, of %d bytes: % x", len(got), got[:min(len(got), 64)])
	}
	return p.DrainTx(patience)
}

// swapped is what the echo network makes of a frame.
func swapped(frame []byte) []byte {
	b := bytes.Clone(frame)
	copy(b, frame[6:12])
	copy(b[6:], frame[:6])
	return b
}
