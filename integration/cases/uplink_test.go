package cases

import (
	"bytes"
	"fmt"
	"net/http"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// TestTAP01_UplinkDownAndDeleted: guests of a switch reach each other whatever happens to the uplink's tap, and lose only what is for
// the outside.
func TestTAP01_UplinkDownAndDeleted(t *testing.T) {
	h := newHost(t)
	h.uplink = true
	g := h.guest(ordinary())
	d, a := g.d, &station{guest: g, name: "vm0", mac: []byte{2, 0, 0, 0, 0, 1}, all: []*frontend.Pair{g.Pair}}
	b := d.join(2, "", ordinary(), 1)
	c := h.cable(tapName)
	// What knows the other's address goes there alone; the uplink sees it because at first nobody does.
	b.gets(a.to(b.mac, 60, 1))
	a.gets(b.to(a.mac, 60, 2))
	outside := []byte{2, 0, 0, 0, 9, 9}
	toA := frameOf(60, 3)
	copy(toA, a.mac)
	copy(toA[6:], outside)
	c.send(virtio.NetHdr{}, toA)
	a.gets(toA)
	b.getsNothing()
	if s := d.switches().Switches[0]; s.Stations != 3 || !s.UplinkUp {
		t.Errorf("switch with two guests and a station outside: %+v", s)
	}

	h.link(tapName, netlink.LinkSetDown)
	eventually(t, "the status tells that the uplink is down", func() bool { return !d.switches().Switches[0].UplinkUp })
	for i := range 20 {
		a.to(outside, 60, byte(i))
		b.gets(a.to(b.mac, 60, byte(i)))
	}
	eventually(t, "frames for the outside are counted", func() bool { return d.switches().Switches[0].Drops["tap_down"] == 20 })
	h.link(tapName, netlink.LinkSetUp)
	c.drain()
	f := a.to(outside, 60, 4)
	if _, got := c.recv(); !bytes.Equal(got, f) {
		t.Errorf("through the tap that is up again came % x", head(got))
	}
	c.send(virtio.NetHdr{}, toA)
	a.gets(toA)
	if !d.switches().Switches[0].UplinkUp {
		t.Error("the tap is up again, the switch's status says that it is down")
	}

	h.link(tapName, netlink.LinkDel)
	for i := range 20 {
		a.to(outside, 60, byte(i))
		b.gets(a.to(b.mac, 60, byte(i)))
	}
	eventually(t, "the status tells that the uplink is gone", func() bool { return !d.switches().Switches[0].UplinkUp })
	if n := d.logged("level=WARN"); n > 3 { // down once, and then gone for two guests
		t.Errorf("%d warnings for two events", n)
	}
	d.command(http.MethodDelete, "/v1/guests/vm1", "", http.StatusNoContent)
}

// TestUplinkQueues sends flows through an uplink with two queue pairs, on two workers, in both directions; none loses a frame or the
// order of its frames.
func TestUplinkQueues(t *testing.T) {
	h := newHost(t)
	opts := ordinary()
	opts.RingSize = 1024
	g := h.serve("switch,name=lan,uplink=tap,uplink-queues=2,uplink-name="+tapName, "--cpus", "0,1").guest(memory(t), opts)
	_, err := g.PostRx(opts.RingSize)
	must(t, err)
	c := h.cable(tapName)
	const flows = 8
	frame := func(flow, n int) []byte {
		f, _ := segment{udp: true, payload: []byte(fmt.Sprintf("%04d of flow %d", n, flow))}.frame()
		f[34] = byte(flow) // of the source port
		return f
	}
	g.transmit(1) // for the switch to know where the guest is
	c.recv()
	for n := range rounds(50, 5000) {
		for flow := range flows {
			must(t, g.SendTx(virtio.NetHdr{}, frame(flow, n), frontend.Direct))
			c.send(virtio.NetHdr{}, swapped(frame(flow, n)))
		}
		must(t, g.DrainTx(patience))
		var seen [2][flows]bool
		for range flows {
			_, out := c.recv()
			_, in := g.recv()
			for i, f := range [][]byte{out, in} {
				var number, flow int
				if _, err := fmt.Sscanf(string(f[len(f)-14:]), "%04d of flow %d", &number, &flow); err != nil || number != n || flow >= flows || seen[i][flow] {
					t.Fatalf("round %d: got % x: %v", n, f, err)
				}
				seen[i][flow] = true
			}
		}
	}
	g.dropped(1, "port_no_receiver", 0)
}
