package virtionet

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// TestFaultBesideChange closes the log, or the table, that was in use while the worker finds out whose the page is that vanished under a
// pair. The race detector sees whether the two touch the same.
func TestFaultBesideChange(t *testing.T) {
	const rounds = 100
	for _, kind := range []string{"log", "memory"} {
		t.Run(kind, func(t *testing.T) {
			r := newRig(t, newFakePort(), rigOptions{features: baseFeatures})
			fd := must(unix.MemfdCreate("dirty-log-test", unix.MFD_CLOEXEC))
			defer unix.Close(fd)
			// What vanishes is not what is changed: that would be found in the new one.
			vanishing, want := r.mem.Regions[1].FD, errGuestMemory
			if kind == "memory" {
				vanishing, want = fd, errDirtyLog
			}
			resize := func(fd int, n int64) { must(0, unix.Ftruncate(fd, n)) }
			resize(fd, rigRegion)
			newLog := func() *guestmem.Log { return must(guestmem.NewLog(rigRegion, 0, fd)) }
			log := newLog()
			r.dev.SetLog(log, -1)
			r.stop(0)
			r.logs[1] = vhostuser.RingLog{On: true, Used: r.at[1] + r.layout().Used}
			r.dev.SetRingLog(1, r.logs[1])
			for range rounds {
				r.post(1, pieces(rigSeam, 1000, 1000, false))
				nextTable, nextLog := r.newTable(), newLog()
				resize(vanishing, 0)
				r.forceKick(1)
				if kind == "log" {
					r.dev.SetLog(nextLog, -1)
					log, nextLog = nextLog, log
				} else {
					must(0, r.dev.SetMemory(nextTable, r.live(nextTable, true)[1:]))
					r.table, nextTable = nextTable, r.table
				}
				must(0, errors.Join(nextLog.Close(), nextTable.Close()))
				if err := <-r.fatal; err != want {
					t.Errorf("the connection was given up with %v", err)
				}
				resize(vanishing, rigRegion)
				r.dev.Connected("test")
				r.stop(1)
				r.reset(1)
				r.start(1)
			}
			r.dev.SetLog(nil, -1)
			must(0, log.Close())
		})
	}
}

// TestPreparedMemoryVanishes leads a ring into a table that was announced and is not in use yet, and whose file has shrunk.
func TestPreparedMemoryVanishes(t *testing.T) {
	via := &pager{page: 4096, late: true, known: map[pageKey]bool{}}
	neighborPort := newFakePort()
	neighbor := newRig(t, neighborPort, rigOptions{features: baseFeatures})
	r := newRig(t, newFakePort(), rigOptions{features: baseFeatures, beside: neighbor, via: via})
	other := must(frontend.NewMemory(rigSeam, rigRegion))
	specs, fds := other.Table()
	fresh := must(guestmem.NewTable(specs, fds))
	must(0, unix.Ftruncate(fds[0], 0))
	r.dev.PrepareMemory(fresh)
	via.use(fresh)
	r.send(plain(100, 1))
	r.forceKick(1)
	r.wantFatal()
	neighbor.serves(neighborPort)
	r.disconnect()
	must(0, errors.Join(fresh.Close(), other.Close()))
}
