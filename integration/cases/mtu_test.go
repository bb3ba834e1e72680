package cases

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

func TestMTU01_ValuesOfTheHost(t *testing.T) {
	d := serve(t, "echo")
	g := d.guest(memory(t), ordinary())
	set := func(c *frontend.Client, mtu uint64) error {
		return c.DoAck(vhostuser.ReqNetSetMTU, binary.LittleEndian.AppendUint64(nil, mtu))
	}
	if offered, err := g.c.GetFeatures(); err != nil || !offered.Has(virtio.FNetMTU) {
		t.Errorf("VIRTIO_NET_F_MTU is not among the offers %v (%v)", offered, err)
	}
	if g.c.Protocol&vhostuser.ProtoNetMTU == 0 {
		t.Error("protocol feature NET_MTU is not offered")
	}
	for _, mtu := range []uint64{68, 1500, 9000, 65535} {
		if err := set(g.c, mtu); err != nil {
			t.Errorf("MTU %d: %v", mtu, err)
		}
	}
	for _, mtu := range []uint64{67, 0, 65536, 1 << 63} {
		refused(t, fmt.Sprint("MTU ", mtu), set(g.c, mtu))
	}
	flows(t, g.Pair)
	must(t, g.c.Close())
	d.disconnected()

	opts := ordinary()
	opts.Protocol = vhostuser.ProtoMQ | vhostuser.ProtoReplyAck
	c := d.connect(g.mem, opts)
	refused(t, "MTU 1500 without the protocol feature", set(c, 1500))
	flows(t, pair(t, c, 0))
}

// runts are frames of all lengths below the minimum of Ethernet that promise more than they hold.
func runts() (frames [][]byte) {
	for _, n := range []int{0, 1, 5, 13, 14, 15, 20, 33, 34, 41, 42, 53, 59} {
		for _, etherType := range []uint16{0x0800, 0x86dd, 0x0806, 0x8100, 0x88a8} {
			frame := bytes.Repeat([]byte{0xff}, 64)
			copy(frame, []byte{0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1})
			binary.BigEndian.PutUint16(frame[12:], etherType)
			frame[14] = 0x4f // IPv4 with 60 bytes of header; total length 65535
			if etherType == 0x86dd {
				frame[14] = 0x60
			}
			frames = append(frames, frame[:n])
		}
	}
	return frames
}

func TestMTU05_Runts(t *testing.T) {
	for _, network := range []string{"null", "source,rate=10", "echo"} {
		for name, opts := range map[string]frontend.Options{"plain": ordinary(), "offloads": offloading(0)} {
			t.Run(network+", "+name, func(t *testing.T) {
				g := newGuest(t, network, opts)
				_, err := g.PostRx(128)
				must(t, err)
				testRunts(t, g, network == "echo")
			})
		}
	}
}

// testRunts sends all runts, plain and with marks where the guest may set some. The network returns what it gets if echo.
func testRunts(t *testing.T, g *guest, echo bool) {
	t.Helper()
	hdrs := []virtio.NetHdr{{}}
	if g.c.Features.Has(virtio.FNetCSum) {
		hdrs = append(hdrs,
			virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 34, CsumOffset: 16},
			virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv4, GSOSize: 1448, CsumStart: 34, CsumOffset: 16},
			virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv6, GSOSize: 1448, CsumStart: 14, CsumOffset: 0})
	}
	short := 0
	for _, frame := range runts() {
		for _, hdr := range hdrs {
			must(t, g.SendTx(hdr, frame, frontend.Direct))
			must(t, g.DrainTx(patience))
			switch {
			case len(frame) < virtio.EthernetHdrLen:
				short++
			case hdr == (virtio.NetHdr{}) && echo:
				if _, got := g.recv(); !bytes.Equal(got, swapped(frame)) {
					t.Fatalf("runt of %d bytes came back as % x", len(frame), got)
				}
			case echo: // passed or dropped: take what came
				_, _, _, err := g.TryRecv()
				must(t, err)
			}
		}
	}
	g.dropped(1, "too_short", short)
	must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
	must(t, g.DrainTx(patience))
}
