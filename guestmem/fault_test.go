package guestmem_test

import (
	"errors"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
)

// needFaultAddresses skips under qemu-user, which does not tell a program where
// it faulted; Guard then has to take the fault for somebody else's.
func needFaultAddresses(t *testing.T) {
	t.Helper()
	fd := memfd(t, page, 0)
	tab := table(t, []guestmem.RegionSpec{{Size: page}}, fd)
	host, _ := tab.Lookup(0, page)
	if err := unix.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if addr, ok := guestmem.AsFault(recover()); !ok || addr == 0 {
			t.Skipf("not applicable: the emulator reports no fault addresses (fault %v, address %#x)", ok, addr)
		}
	}()
	bytesAt(host, 1)[0] = 1
	t.Error("no fault behind the end of a file")
}

// A file truncated under its user costs that user an error and nobody else anything.
func TestGuard(t *testing.T) {
	needFaultAddresses(t)
	victim, other := memfd(t, 4*page, 0), memfd(t, 4*page, 0)
	spec := []guestmem.RegionSpec{{Size: 4 * page}}
	a, b := table(t, spec, victim), table(t, spec, other)
	hostA, _ := a.Lookup(0, 4*page)
	hostB, _ := b.Lookup(0, 4*page)

	var stop atomic.Bool
	var turns atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for ; !stop.Load(); runtime.Gosched() {
			bytesAt(hostB, 1)[0]++
			turns.Add(1)
		}
	})
	defer wg.Wait()
	defer stop.Store(true)

	if err := a.Guard(func() { clear(bytesAt(hostA, 4*page)) }); err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(victim, page); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4*page)
	for name, f := range map[string]func(){
		"load":     func() { buf[0] = bytesAt(hostA, 4*page)[2*page] },
		"store":    func() { bytesAt(hostA, 4*page)[2*page] = 1 },
		"copy in":  func() { copy(buf, bytesAt(hostA, 4*page)) },
		"copy out": func() { copy(bytesAt(hostA, 4*page), buf) },
	} {
		for range 20 {
			reached := false
			err := a.Guard(func() {
				f()
				reached = true
			})
			var fault *guestmem.FaultError
			if !errors.As(err, &fault) || reached || !a.Owns(fault.Addr) {
				t.Fatalf("%s: %v, went on: %v", name, err, reached)
			}
		}
	}
	if err := a.Guard(func() { clear(bytesAt(hostA, page)) }); err != nil {
		t.Errorf("the page that is left: %v", err)
	}
	before := turns.Load()
	for end := time.Now().Add(5 * time.Second); turns.Load() == before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the user of the other table stands still")
		}
	}
}

// Guard passes on what is not its table's fault.
func TestGuardPassesOthers(t *testing.T) {
	gone := memfd(t, page, 0)
	tab, other := table(t, []guestmem.RegionSpec{{Size: page}}, memfd(t, page, 0)), table(t, []guestmem.RegionSpec{{Size: page}}, gone)
	host, _ := other.Lookup(0, page)
	if err := unix.Ftruncate(gone, 0); err != nil {
		t.Fatal(err)
	}
	var slice []int
	for name, f := range map[string]func(){
		"panic":           func() { panic("mine") },
		"index":           func() { slice[len(slice)]++ },
		"another's fault": func() { bytesAt(host, 1)[0]++ },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was swallowed", name)
				}
			}()
			err := tab.Guard(f)
			t.Errorf("%s: %v", name, err)
		}()
	}
}

func TestAsFault(t *testing.T) {
	for _, v := range []any{nil, "text", errors.New("error"), 5} {
		if _, ok := guestmem.AsFault(v); ok {
			t.Errorf("%v is a fault", v)
		}
	}
}
