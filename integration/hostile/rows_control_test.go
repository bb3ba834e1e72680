package hostile

import (
	"bytes"
	"sync"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// command sends one command and demands the answer, in one byte.
func (a *attack) command(q *frontend.Queue, want, class, cmd byte, data ...byte) {
	a.t.Helper()
	answer, n, err := q.Command(class, cmd, data, frontend.Chained, patience)
	must(a.t, err)
	if answer != want || n != 1 {
		a.t.Errorf("class %d, command %d, % x: answer %d in %d bytes, want %d in 1", class, cmd, data, answer, n, want)
	}
}

// withControl is evil with a running pair and a control queue.
func (a *attack) withControl(f virtio.Features) (*frontend.Client, *frontend.Pair, *frontend.Queue) {
	a.t.Helper()
	c := a.client(frontend.Options{Order: frontend.Crosvm, Features: controlled | f})
	p := a.pair(c, 0)
	q, err := c.StartControl(4)
	must(a.t, err)
	must(a.t, c.Sync())
	return c, p, q
}

// works demands that the control queue answers.
func (a *attack) works(q *frontend.Queue) {
	a.t.Helper()
	a.command(q, virtio.CtrlOK, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 1, 0)
	a.command(q, virtio.CtrlErr, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 5, 0)
}

var controlRows = []row{
	{"B11", "command_changes_between_reads", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p, q := a.withControl(f & virtio.FRingPacked)
			copy(c.Mem.Bytes(bufAt, 16), []byte{virtio.CtrlMQ, virtio.CtrlMQPairsSet, 1, 0, 0xff})
			pokeTable(c.Mem, q, desc{bufAt, 4, next, 1}, desc{bufAt + 8, 1, write, 0})
			stop := make(chan struct{})
			var flipping sync.WaitGroup
			flipping.Go(func() {
				for n := uint16(0); !closed(stop); n++ {
					pokeTable(c.Mem, q, desc{bufAt, 4 + uint32(n%2)*0xfffff000, next, 1 + n%3*500}, desc{bufAt + 8 + uint64(n%5/4)*hole, 1, write, 0})
					c.Mem.Bytes(bufAt, 4)[2] = byte(n)
				}
			})
			for range 60 {
				offered := a.offer(q, desc{tableAt, 32, indirect, 0})
				eventually(a.t, "the command is returned", func() bool { _, ok := offered.used(); return ok })
				if n, _ := offered.used(); n > 1 {
					a.t.Fatalf("%d bytes were written", n)
				}
				q.Driver.Attach(q.Driver.AvailIdx())
			}
			close(stop)
			flipping.Wait()
			a.works(q)
			a.flows(p)
		})
	}},
	{"B15", "control_chains_that_loop_or_wrap", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, _, q := a.withControl(f & virtio.FRingPacked)
			if q.Ring != nil {
				a.offer(q, desc{bufAt, 2, next, 1}, desc{bufAt, 2, next, 0}).returned(0)
				a.offer(q, desc{bufAt, 2, next, 64}).returned(0)
			}
			a.offer(q, desc{hole, 2, next, 1}, desc{bufAt + 8, 1, write, 0}).returned(0)
			copy(c.Mem.Bytes(bufAt, 16), []byte{virtio.CtrlMQ, virtio.CtrlMQPairsSet, 1, 0})
			a.offer(q, desc{bufAt, 4, next, 1}, desc{bufAt + 8, 8, write, 0}).returned(1) // the answer is one byte
			for range 25 {                                                                // around the ring
				a.works(q)
			}
		})
	}},
	{"B16", "commands_shorter_than_their_class", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p, q := a.withControl(f & virtio.FRingPacked)
			for _, class := range []byte{virtio.CtrlRX, virtio.CtrlMAC, virtio.CtrlVLAN, virtio.CtrlMQ, 3, 5, 6, 0xff} {
				for cmd := range byte(3) {
					a.command(q, virtio.CtrlErr, class, cmd)
				}
			}
			a.command(q, virtio.CtrlErr, virtio.CtrlMAC, virtio.CtrlMACAddrSet, 2, 0, 0, 0, 0)
			a.command(q, virtio.CtrlErr, virtio.CtrlMAC, virtio.CtrlMACTableSet, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0)
			a.command(q, virtio.CtrlErr, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 1)
			copy(c.Mem.Bytes(bufAt, 16), []byte{virtio.CtrlMQ})
			a.offer(q, desc{bufAt, 1, next, 1}, desc{bufAt + 8, 1, write, 0}).returned(1) // not even a command
			a.offer(q, desc{bufAt, 4, 0, 0}).returned(0)                                  // no room for the answer
			a.works(q)
			a.flows(p)
		})
	}},
	{"B24", "rss_is_not_offered", func(a *attack) {
		c, _, q := a.withControl(0)
		if f, err := c.GetFeatures(); err != nil || f.Any(virtio.FNetRSS|virtio.FNetHashReport) {
			a.t.Errorf("offered are %v, %v", f, err)
		}
		for cmd := byte(1); cmd < 4; cmd++ { // RSS_CONFIG, HASH_CONFIG
			a.command(q, virtio.CtrlErr, virtio.CtrlMQ, cmd, bytes.Repeat([]byte{0xff}, 60)...)
		}
		a.works(q)
		must(a.t, c.Close())
		a.refused("RSS", a.client(frontend.Options{}).SetFeatures(features|virtio.FNetRSS))
	}},
	{"B31", "crypto_is_not_offered", func(a *attack) {
		c := a.client(frontend.Options{})
		if p, err := c.GetProtocolFeatures(); err != nil || p&vhostuser.ProtoCrypto != 0 {
			a.t.Errorf("offered are %v, %v", p, err)
		}
		a.refused("CRYPTO_SESSION", c.DoAck(vhostuser.ReqSetProtocolFeatures, word(uint64(c.Protocol|vhostuser.ProtoCrypto))))
		a.refused("CLOSE_CRYPTO_SESSION", c.DoAck(vhostuser.ReqCloseCryptoSession, word(1)))
		must(a.t, c.Close())
		a.closesAfter(message(vhostuser.ReqCreateCryptoSession, bytes.Repeat([]byte{0xff}, 4000)), "CREATE_CRYPTO_SESSION, whose reply cannot be given")
	}},
}
