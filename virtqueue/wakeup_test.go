package virtqueue_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// sleepers is both sides of a ring that sleep whenever they may. The model knows
// nothing of events, only what sleeping demands: a side that sleeps while there
// is something for it to do has been signaled.
type sleepers struct {
	*sides
	published, used int // chains that wait for the device and for the driver
	fresh           int // published chains that were never delivered

	devSleeps, forMore, kicked bool
	drvSleeps, delayed, called bool
}

// TestNoLostWakeUp: NTF-01 and NTF-03 in any order of steps.
func TestNoLostWakeUp(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		o := rigOptions{size: rapid.SampledFrom([]int{1, 2, 8, 16}).Draw(rt, "size")}
		for _, f := range []virtio.Features{packed, eventIdx, virtio.FInOrder} {
			if rapid.Bool().Draw(rt, f.String()) {
				o.features |= f
			}
		}
		m := &sleepers{sides: newSides(t, o)}
		defer m.mem.Close()
		rt.Repeat(map[string]func(*rapid.T){
			"send": m.send, "serve": m.serve, "return": m.giveBack, "device sleeps": m.devSleep,
			"take": m.take, "driver sleeps": m.drvSleep, "round": m.round, "": m.check,
		})
	})
}

// round leaves a driver that has taken all and sleeps.
func (m *sleepers) round(rt *rapid.T) {
	m.send(rt)
	m.serve(rt)
	for m.take(rt); m.used > 0 && !m.drvSleeps; {
		m.take(rt)
	}
	m.drvSleep(rt)
}

// send publishes some chains and kicks if the device wants that. Waiting for used ones does not keep a driver from it.
func (m *sleepers) send(rt *rapid.T) {
	for range rapid.IntRange(1, 4).Draw(rt, "chains") {
		if _, err := m.drv.AddDirect(driver.Buf{Addr: bufGPA, Len: 1}); err != nil {
			break
		}
	}
	n := m.drv.Publish()
	m.published, m.fresh = m.published+n, m.fresh+n
	m.kicked = m.drv.NeedsKick() || m.kicked
}

// serve takes chains, completes some of them and gives the others back.
func (m *sleepers) serve(rt *rapid.T) {
	if !m.devAwake() {
		return
	}
	if rapid.Bool().Draw(rt, "no kicks") {
		m.dev.DisableKicks()
	}
	n, err := m.dev.Fill(m.b, rapid.IntRange(1, 4).Draw(rt, "max"))
	if err != nil {
		rt.Fatal(err)
	}
	m.fresh = min(m.fresh, m.published-n)
	done := rapid.IntRange(0, n).Draw(rt, "done")
	m.dev.CompleteBatch(m.b, 0, done)
	m.b.Reset()
	m.dev.Unfill(n - done)
	m.published -= done
	m.used += m.dev.Publish(0)
	m.called = m.dev.NeedsCall() || m.called
}

// giveBack looks at chains without using them.
func (m *sleepers) giveBack(rt *rapid.T) {
	if !m.devAwake() {
		return
	}
	n, err := m.dev.Fill(m.b, virtqueue.MaxBatch)
	if err != nil {
		rt.Fatal(err)
	}
	m.b.Reset()
	m.dev.Unfill(n)
	m.fresh = min(m.fresh, m.published-n)
}

func (m *sleepers) devAwake() bool {
	if m.devSleeps && m.kicked {
		m.devSleeps, m.kicked = false, false
	}
	return !m.devSleeps
}

func (m *sleepers) devSleep(rt *rapid.T) {
	if !m.devAwake() {
		return
	}
	m.kicked = false
	m.forMore = rapid.Bool().Draw(rt, "for more")
	if m.forMore {
		m.devSleeps = !m.dev.EnableKicksForMore()
	} else {
		m.devSleeps = !m.dev.EnableKicks()
	}
}

// take takes used chains and works without calls.
func (m *sleepers) take(rt *rapid.T) {
	if m.drvSleeps && !m.called {
		return
	}
	m.drvSleeps, m.called = false, false
	if rapid.Bool().Draw(rt, "no calls") {
		m.drv.DisableCalls()
	}
	for range rapid.IntRange(0, 8).Draw(rt, "chains") {
		if _, _, ok := m.drv.GetUsed(); ok {
			m.used--
		}
	}
}

func (m *sleepers) drvSleep(rt *rapid.T) {
	if m.drvSleeps && !m.called {
		return
	}
	m.called = false
	m.delayed = rapid.Bool().Draw(rt, "delayed")
	if m.delayed {
		m.drvSleeps = !m.drv.DelayCalls()
	} else {
		m.drvSleeps = !m.drv.EnableCalls()
	}
}

func (m *sleepers) check(rt *rapid.T) {
	if m.used < 0 || m.drv.HasUsed() != (m.used > 0) || m.drv.Err() != nil {
		rt.Fatalf("%d used, HasUsed = %v, %v", m.used, m.drv.HasUsed(), m.drv.Err())
	}
	waiting := m.published
	if m.forMore {
		waiting = m.fresh
	}
	if m.devSleeps && waiting > 0 && !m.kicked {
		rt.Fatalf("the device sleeps (for more: %v) and %d chains wait for it", m.forMore, waiting)
	}
	// One that asked for a late call may be left with some of its chains, not with all of them.
	waiting = m.used
	if m.delayed && m.published > 0 {
		waiting = 0
	}
	if m.drvSleeps && waiting > 0 && !m.called {
		rt.Fatalf("the driver sleeps (delayed: %v) and %d used chains wait for it", m.delayed, waiting)
	}
}
