package daemon

import (
	"time"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtionet"
	"github.com/vhostd/vhostd/virtqueue"
)

const (
	watchEvery = time.Second
	// stillFor is how long kicks may come without any movement of the rings before the warning.
	stillFor = 3 * time.Second
)

// watch looks at every guest once a second for what nobody else notices: a network that goes down
// or comes back, of which the front-end is told, and a front-end whose memory is not shared.
func (d *Daemon) watch() {
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	watchers := map[*guest]*watcher{}
	for {
		select {
		case <-d.monitor:
			return
		case now := <-ticker.C:
			alive := map[*guest]*watcher{}
			for _, g := range d.list() {
				w := watchers[g]
				if w == nil {
					w = &watcher{up: true}
				}
				w.look(g, now)
				alive[g] = w
			}
			watchers = alive
		}
	}
}

// watcher remembers what was seen of one guest.
type watcher struct {
	up      bool
	current *connection // session that the fields below belong to
	judged  bool        // the session's memory works, or the warning was given
	still   stillness
}

func (w *watcher) look(g *guest, now time.Time) {
	if s, ok := g.portStatus(); ok && s.Up != w.up {
		w.up = s.Up
		if s.Up {
			g.log.Info("network is up", "network", g.net().String())
		} else {
			g.log.Warn("network is down", "network", g.net().String(), "detail", s.Detail)
		}
	}
	g.mu.Lock()
	c, device := g.current, g.device
	g.mu.Unlock()
	if c != w.current {
		w.current, w.judged, w.still = c, false, stillness{}
	}
	if c != nil {
		c.session.LookAtConfig()
	}
	if c == nil || device == nil || w.judged {
		return
	}
	switch w.still.judge(device.Snapshot(), now) {
	case moving:
		w.judged = true
	case stuck:
		w.judged = true
		g.log.Warn("the guest kicks but its rings never move: is its memory shared with this process? QEMU needs memory-backend-memfd with share=on, libvirt <access mode='shared'/>")
	}
}

// stillness judges whether a driver kicks although nothing ever becomes available: what a back-end
// sees that mapped a private copy of the guest's memory. A working driver with nothing to send has
// filled its receive rings. Kicks before the first look are not counted, because front-ends may
// kick rings by themselves when they start.
type stillness struct {
	seen  bool
	base  uint64    // kicks at the first look
	since time.Time // of the first kick after it
}

type verdict int

const (
	unknown verdict = iota
	moving
	stuck
)

func (s *stillness) judge(snapshot virtionet.DeviceStats, now time.Time) verdict {
	var kicks uint64
	running := false
	start := uint16(0)
	if snapshot.Features.Has(virtio.FRingPacked) {
		start = uint16(virtqueue.FreshPacked & 0xffff) // where a driver begins
	}
	for _, r := range snapshot.Rings {
		if !r.Started {
			continue
		}
		running = true
		kicks += r.Kicks
		if r.AvailIdx != r.LastAvail || r.LastAvail != start {
			return moving
		}
	}
	switch {
	case !running:
		*s = stillness{}
	case !s.seen:
		s.seen, s.base = true, kicks
	case kicks == s.base:
	case s.since.IsZero():
		s.since = now
	case now.Sub(s.since) >= stillFor:
		return stuck
	}
	return unknown
}
