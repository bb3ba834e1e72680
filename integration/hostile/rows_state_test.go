package hostile

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// save takes the state of a stopped device.
func (a *attack) save(c *frontend.Client) []byte {
	a.t.Helper()
	r, w := a.pipe()
	must(a.t, c.SetDeviceStateFD(vhostuser.StateSave, int(w.Fd())))
	w.Close()
	b, err := io.ReadAll(r)
	must(a.t, err)
	must(a.t, c.CheckDeviceState())
	return b
}

// loadState offers a state, and returns what the program says to it.
func (a *attack) loadState(c *frontend.Client, write func(w *os.File)) error {
	a.t.Helper()
	r, w := a.pipe()
	must(a.t, c.SetDeviceStateFD(vhostuser.StateLoad, int(r.Fd())))
	r.Close()
	write(w)
	w.Close()
	return c.CheckDeviceState()
}

var stateRows = []row{
	{"C80", "device_state", func(a *attack) {
		c, p := a.running(frontend.Options{})
		a.flows(p)
		_, w := a.pipe()
		a.refused("state of running rings", c.SetDeviceStateFD(vhostuser.StateSave, int(w.Fd())))
		_, _, err := c.Stop(0)
		must(a.t, err)
		a.refused("memory for a pipe", c.SetDeviceStateFD(vhostuser.StateSave, c.Mem.Regions[0].FD))
		state := a.save(c)
		before := a.held()
		for what, b := range map[string][]byte{
			"truncated": state[:len(state)-1], "another version": append([]byte("vhostd\x00n\x09"), state[9:]...), "garbage": bytes.Repeat([]byte{7}, 4096),
		} {
			a.refused(what, a.loadState(c, func(w *os.File) { _, _ = w.Write(b) }))
		}
		a.refused("garbage without end", a.loadState(c, func(w *os.File) {
			for sent, b := 0, make([]byte, 1<<16); sent < 1<<30; sent += len(b) {
				if _, err := w.Write(b); err != nil {
					return // the program has seen enough
				}
			}
		}))
		// A pipe that nobody drains, one that is never closed: the transfer before ends with the next, and CHECK in time.
		var full [2]int
		must(a.t, unix.Pipe2(full[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
		for err := error(nil); err == nil; {
			_, err = unix.Write(full[1], make([]byte, 4096))
		}
		open, _ := a.pipe()
		for range 3 {
			must(a.t, c.SetDeviceStateFD(vhostuser.StateSave, full[1]))
			must(a.t, c.SetDeviceStateFD(vhostuser.StateLoad, int(open.Fd())))
		}
		unix.Close(full[0])
		unix.Close(full[1])
		must(a.t, a.loadState(c, func(w *os.File) { _, _ = w.Write(state) }))
		a.flat(before)
		a.flows(a.pair(c, 0))
		select { // begun before the first row
		case err := <-a.checked:
			a.refused("a pipe that nobody writes or closes", err)
		case <-time.After(2 * patience):
			a.t.Error("CHECK_DEVICE_STATE is not answered")
		}
	}},
	{"C81", "config_ranges", func(a *attack) {
		c := a.client(frontend.Options{})
		for _, r := range [][2]uint32{{0, 0}, {0, 25}, {24, 1}, {0, 257}, {0xffffffff, 1}, {0xffffffff, 0xffffff00}, {23, 2}} {
			m := append(vhostuser.ConfigSpace{Offset: r[0], Size: r[1]}.Append(nil), make([]byte, min(r[1], 4000))...)
			if b, err := c.Call(vhostuser.ReqGetConfig, m); err != nil || len(b) != 0 {
				a.t.Errorf("%d bytes at %d: a reply of %d bytes, %v; want the empty one", r[1], r[0], len(b), err)
			}
			a.refused(fmt.Sprintf("a write of %d bytes at %d", r[1], r[0]), c.DoAck(vhostuser.ReqSetConfig, m))
		}
		for at := range uint32(24) {
			a.refused(fmt.Sprint("a write to byte ", at), c.SetConfig(at, []byte{0x55}, 0))
		}
		a.flows(a.pair(c, 0))
	}},
	{"C82", "mtu", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for _, mtu := range []uint64{0, 67, 65536, 1 << 32, 1<<32 | 1500, 1 << 63} {
			a.refused(fmt.Sprint("MTU ", mtu), c.NetSetMTU(mtu))
		}
		must(a.t, c.NetSetMTU(68))
		must(a.t, c.NetSetMTU(65535))
		a.flows(p)
	}},
	{"C83", "announcements", func(a *attack) {
		c, p := a.running(frontend.Options{})
		a.refused("a group's address", c.SendRARP([6]byte{1, 0, 0x5e, 0, 0, 1}))
		a.refused("everybody's", c.SendRARP([6]byte{255, 255, 255, 255, 255, 255}))
		a.refused("none", c.SendRARP([6]byte{}))
		taken := 0
		for range 500 {
			if err := c.SendRARP([6]byte{2, 0, 0, 0, 0, 1}); err == nil {
				taken++
			} else {
				a.refused("a flood", err)
			}
		}
		if taken == 0 || taken > 100 {
			a.t.Errorf("%d of 500 announcements were sent", taken)
		}
		a.drainRx(p)
	}},
	{"C84", "postcopy", func(a *attack) {
		c := a.conn() // does not offer it unless --postcopy is on
		a.refused("LISTEN", c.PostcopyListen())
		a.refused("END", c.PostcopyEnd())
		must(a.t, c.Close())
		a.closesAfter(message(vhostuser.ReqPostcopyAdvise, nil), "ADVISE, whose reply cannot be given")
		a.postcopyOrders()
	}},
}
