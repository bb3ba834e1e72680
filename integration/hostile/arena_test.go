package hostile

import (
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// TestBacklogs: a guest that sends large frames on all its pairs and never takes one back leaves memory to others.
func TestBacklogs(t *testing.T) {
	d := serve(t, false)
	c, p := d.guest("evil", frontend.Options{RingSize: 1024, TxBuf: 64, RxBuf: 64})
	frame, err := c.Mem.Alloc(0, 65000, 64)
	must(t, err)
	stop := make(chan struct{})
	defer close(stop)
	for i := range 4 {
		if i > 0 {
			p, err = c.StartPair(i)
			must(t, err)
		}
		must(t, c.Sync())
		p.TX.Ring.PokeDesc(0, frame, 65000, 0, 0)
		go feed(p.TX, stop)
	}
	time.Sleep(2 * time.Second)
	_, good := d.guest("good", frontend.Options{})
	t.Logf("%v", worst(t, good, 500*time.Millisecond))
}
