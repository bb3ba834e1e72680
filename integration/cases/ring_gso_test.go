package cases

import (
	"fmt"
	"testing"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// nonsense is a header that does not fit its frame, or that the guest may not use. reason is what the drop counts as; "" stands
// for a header that is odd but means something.
type nonsense struct {
	name   string
	hdr    virtio.NetHdr
	frame  []byte
	reason string
}

func nonsenseHeaders() []nonsense {
	v4, v6, udp := segment{payload: text(3000)}, segment{v6: true, payload: text(3000)}, segment{udp: true, payload: text(3000)}
	frame, _ := v4.frame()
	frame6, _ := v6.frame()
	datagram, _ := udp.frame()
	long, _ := segment{payload: text(65535 - 40)}.frame()
	arp := frameOf(60, 1)
	copy(arp[12:], []byte{0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1})
	type change func(*virtio.NetHdr)
	of := func(s segment, c change) virtio.NetHdr {
		h := s.marks(mss)
		c(&h)
		return h
	}
	return []nonsense{
		{"gso_size 0", of(v4, func(h *virtio.NetHdr) { h.GSOSize = 0 }), frame, "gso_size_too_small"},
		{"gso_size 1 on the largest frame", of(v4, func(h *virtio.NetHdr) { h.GSOSize = 1 }), long, "gso_size_too_small"},
		{"gso_size 47", of(v4, func(h *virtio.NetHdr) { h.GSOSize = 47 }), frame, "gso_size_too_small"},
		{"gso_size 65535", of(v4, func(h *virtio.NetHdr) { h.GSOSize = 65535 }), frame, ""},
		{"no NEEDS_CSUM", of(v4, func(h *virtio.NetHdr) { h.Flags = 0 }), frame, "gso_without_csum"},
		{"gso_type 2", of(v4, func(h *virtio.NetHdr) { h.GSOType = 2 }), frame, "gso_unknown"},
		{"gso_type 7", of(v4, func(h *virtio.NetHdr) { h.GSOType = 7 }), frame, "gso_unknown"},
		{"gso_type 0x7f", of(v4, func(h *virtio.NetHdr) { h.GSOType = 0x7f }), frame, "gso_unknown"},
		{"ECN alone", of(v4, func(h *virtio.NetHdr) { h.GSOType = virtio.GSOECN }), frame, "gso_unknown"},
		{"UFO", of(udp, func(h *virtio.NetHdr) { h.GSOType = virtio.GSOUDP }), datagram, "gso_not_acked"},
		{"USO", of(udp, func(h *virtio.NetHdr) { h.GSOType = virtio.GSOUDPL4 }), datagram, "gso_not_acked"},
		{"TCPv6 on IPv4", of(v4, func(h *virtio.NetHdr) { h.GSOType = virtio.GSOTCPv6 }), frame, "gso_protocol_mismatch"},
		{"TCPv4 on IPv6", of(v6, func(h *virtio.NetHdr) { h.GSOType = virtio.GSOTCPv4 }), frame6, "gso_protocol_mismatch"},
		{"TCPv4 on UDP", of(udp, func(h *virtio.NetHdr) { h.CsumOffset = 16 }), datagram, "gso_protocol_mismatch"},
		{"TCPv4 on ARP", of(v4, func(h *virtio.NetHdr) {}), arp, "gso_protocol_mismatch"},
		{"20 bytes", of(v4, func(h *virtio.NetHdr) { h.CsumStart, h.CsumOffset = 14, 0 }), frame[:20], "gso_headers_short"},
		{"headers only", of(v4, func(h *virtio.NetHdr) {}), frame[:54], "header_truncated"},
		{"checksum of another header", of(v4, func(h *virtio.NetHdr) { h.CsumStart = 14 }), frame, "gso_csum_mismatch"},
		{"checksum behind the frame", of(v4, func(h *virtio.NetHdr) { h.CsumStart = 0xffff; h.CsumOffset = 0xffff }), frame, "csum_out_of_range"},
		{"hdr_len 0", of(v4, func(h *virtio.NetHdr) { h.HdrLen = 0 }), frame, ""},
		{"hdr_len 65535", of(v4, func(h *virtio.NetHdr) { h.HdrLen = 65535 }), frame, ""},
		{"num_buffers", of(v4, func(h *virtio.NetHdr) { h.NumBuffers = 7 }), frame, ""},
	}
}

func TestRING08_NonsenseGSOHeaders(t *testing.T) {
	for _, network := range []string{"null", "echo", "tap"} {
		for name, rx := range map[string]virtio.Features{"offloads": canReceive, "finished in software": 0} {
			if rx == 0 && network != "echo" {
				continue
			}
			t.Run(network+", "+name, func(t *testing.T) {
				var g *guest
				if network == "tap" {
					g = newHost(t).guest(offloading(rx))
				} else {
					g = newOffloading(t, network, offloading(rx))
				}
				testNonsense(t, g)
			})
		}
	}
}

func testNonsense(t *testing.T, g *guest) {
	drops := map[string]int{}
	passed := 0
	for _, n := range nonsenseHeaders() {
		before := g.d.cpu()
		must(t, g.SendTx(n.hdr, n.frame, frontend.Chained))
		must(t, g.DrainTx(patience))
		if n.reason == "" {
			passed++
		} else {
			drops[n.reason]++
			g.dropped(1, n.reason, drops[n.reason])
		}
		for _, _, ok, err := g.TryRecv(); ok || err != nil; _, _, ok, err = g.TryRecv() {
			must(t, err)
		}
		_, err := g.PostRx(128)
		must(t, err)
		// The control socket's answers cost more than the frame, and the race detector multiplies both.
		if spent := g.d.cpu() - before; spent > prompt {
			t.Errorf("%s: %v of processor time", n.name, spent)
		}
		must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
		must(t, g.DrainTx(patience))
		passed++
	}
	eventually(t, fmt.Sprint(passed, " frames pass"), func() bool { return g.d.ring(1).Packets == uint64(passed) })
	for reason, n := range g.d.ring(1).Drops {
		// Linux keeps gso_size 65535 for itself (GSO_BY_FRAGS), so a tap refuses that one.
		kernel := reason == "port_discarded" || reason == "port_bad_header" && n == 1
		if n != uint64(drops[reason]) && !kernel {
			t.Errorf("%d frames dropped as %s, want %d", n, reason, drops[reason])
		}
	}
}

// TestRING08_SegmentationNotNegotiated: a guest that acknowledged CSUM alone asks for segmentation.
func TestRING08_SegmentationNotNegotiated(t *testing.T) {
	opts := offloading(0)
	opts.Features &^= canSend &^ virtio.FNetCSum
	g := newOffloading(t, "echo", opts)
	s := segment{payload: text(3000)}
	frame, _ := s.frame()
	must(t, g.SendTx(s.marks(mss), frame, frontend.Chained))
	g.dropped(1, "gso_not_acked", 1)
	ecn := s.marks(mss)
	ecn.GSOType |= virtio.GSOECN
	must(t, g.SendTx(ecn, frame, frontend.Chained))
	g.dropped(1, "gso_not_acked", 2)
	flows(t, g.Pair)

	opts.Features |= virtio.FNetHostTSO4
	g = newOffloading(t, "echo", opts)
	must(t, g.SendTx(ecn, frame, frontend.Chained))
	g.dropped(1, "ecn_not_acked", 1)
	flows(t, g.Pair)
}
