package virtqueue

import (
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
)

// MissError says that the next chain refers to an address that Config.Via does
// not know yet. It is the ring's and valid until the next Fill.
type MissError struct {
	Addr, Len uint64 // what is missing begins at Addr; the Len bytes are what the chain wants from there on
	Write     bool   // it is to be written
}

func (e *MissError) Error() string {
	return fmt.Sprintf("virtqueue: address %#x (%d bytes, write: %v) is not translated yet", e.Addr, e.Len, e.Write)
}

// lookup returns what Cursor.Lookup does.
func (t *translator) lookup(cur *guestmem.Cursor, addr, n uint64, write bool) (host uintptr, run uint64) {
	if t.via == nil {
		return cur.Lookup(addr, n)
	}
	return t.ask(cur, addr, n, write)
}

// ask looks addr up through the translator.
func (t *translator) ask(cur *guestmem.Cursor, addr, n uint64, write bool) (host uintptr, run uint64) {
	t.missed = false
	if host, ok := cur.Hit(addr, n); ok {
		return host, n
	}
	t.walked++
	m, outcome := t.via.Translate(addr, write)
	if outcome != guestmem.Mapped {
		if outcome == guestmem.Missing {
			t.missed, t.miss = true, MissError{Addr: addr, Len: max(n, 1), Write: write}
		}
		return 0, 0
	}
	if t.want != bothWays { // there a cursor would serve both kinds of access
		cur.Remember(m)
	}
	off := addr - m.Addr
	return m.Host + uintptr(off), min(n, m.Size-off)
}

// writes reports whether the buffer at hand is to be written.
func (t *translator) writes() bool {
	return t.want == descFWrite || t.want == bothWays && t.readable >= 0
}

// absent is why the look-up before found nothing.
func (t *translator) absent() Fault {
	if t.missed {
		return faultMissing
	}
	return FaultAddress
}

// missing is the error of a Fill that ended after n chains at one that could not
// be taken.
func (t *translator) missing(n int) error {
	missed := t.missed
	t.missed = false
	if n > 0 || !missed {
		return nil
	}
	return &t.miss
}
