package virtionet

import (
	"encoding/binary"
	"net"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/virtio"
)

// ipFrame is a TCP or UDP frame with all checksums right.
func ipFrame(t testing.TB, v6, udp bool, payload int) []byte {
	t.Helper()
	eth := &layers.Ethernet{SrcMAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, DstMAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, EthernetType: layers.EthernetTypeIPv4}
	proto := layers.IPProtocolTCP
	if udp {
		proto = layers.IPProtocolUDP
	}
	var network interface {
		gopacket.NetworkLayer
		gopacket.SerializableLayer
	} = &layers.IPv4{Version: 4, TTL: 64, Protocol: proto, SrcIP: net.IPv4(10, 0, 0, 1), DstIP: net.IPv4(10, 0, 0, 2)}
	if v6 {
		eth.EthernetType = layers.EthernetTypeIPv6
		network = &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: proto, SrcIP: net.ParseIP("fd00::1"), DstIP: net.ParseIP("fd00::2")}
	}
	var transport gopacket.SerializableLayer
	if udp {
		u := &layers.UDP{SrcPort: 1, DstPort: 2}
		_ = u.SetNetworkLayerForChecksum(network)
		transport = u
	} else {
		c := &layers.TCP{SrcPort: 1, DstPort: 2, ACK: true, Window: 1000}
		_ = c.SetNetworkLayerForChecksum(network)
		transport = c
	}
	buf := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		eth, network, transport, gopacket.Payload(pattern(payload, 1)))
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte(nil), buf.Bytes()...)
}

// unfinished is the frame as a sender leaves it that has the checksum done by others:
// its field holds the sum over the pseudo header.
func unfinished(t testing.TB, v6, udp bool, payload int) (f frame, whole []byte) {
	t.Helper()
	whole = ipFrame(t, v6, udp, payload)
	start, proto, addrs := 34, uint32(6), whole[26:34]
	if v6 {
		start, addrs = 54, whole[22:54]
	}
	offset := 16
	if udp {
		offset, proto = 6, 17
	}
	f = frame{virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: uint16(start), CsumOffset: uint16(offset)}, append([]byte(nil), whole...)}
	sum := ^gopacket.FoldChecksum(gopacket.ComputeChecksum(addrs, proto+uint32(len(whole)-start)))
	binary.BigEndian.PutUint16(f.data[start+offset:], sum)
	return f, whole
}

// segmented is a TCP frame to be cut into segments.
func segmented(t testing.TB, v6, ecn bool, payload, size int) frame {
	t.Helper()
	f, _ := unfinished(t, v6, false, payload)
	f.hdr.GSOType, f.hdr.GSOSize, f.hdr.HdrLen = virtio.GSOTCPv4, uint16(size), f.hdr.CsumStart+20
	if v6 {
		f.hdr.GSOType = virtio.GSOTCPv6
	}
	if ecn {
		f.hdr.GSOType |= virtio.GSOECN
	}
	return f
}

// verify checks every length and checksum of a frame and returns its payload.
func verify(t testing.TB, b []byte) []byte {
	t.Helper()
	p := gopacket.NewPacket(b, layers.LayerTypeEthernet, gopacket.Default)
	if e := p.ErrorLayer(); e != nil || p.Metadata().Truncated {
		t.Fatalf("a frame does not decode: %v", e)
	}
	if l, ok := p.TransportLayer().(interface {
		SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
	}); ok {
		_ = l.SetNetworkLayerForChecksum(p.NetworkLayer())
	}
	if err, bad := p.VerifyChecksums(); err != nil || len(bad) > 0 {
		t.Fatalf("wrong checksums: %v %v", err, bad)
	}
	return p.TransportLayer().LayerPayload()
}

const guestOffloads = virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN

// TestReceiveUnfinishedChecksum is OFF-01 and OFF-10: marks for a guest that knows them, a
// finished frame without any for another.
func TestReceiveUnfinishedChecksum(t *testing.T) {
	for _, base := range []virtio.Features{baseFeatures, modernSingle, legacyFeatures} {
		for _, guest := range []virtio.Features{0, virtio.FNetGuestCSum, guestOffloads} {
			p := newFakePort()
			r := newRig(t, p, rigOptions{features: base | guest})
			for i, kind := range [][2]bool{{false, false}, {false, true}, {true, false}, {true, true}} {
				f, whole := unfinished(t, kind[0], kind[1], 100+i)
				chains := []rxBuffer{r.offer(1526), r.offer(1526), r.offer(1526)}
				p.feed(plain(60, 1), f, plain(61, 2))
				r.run()
				_, chains = r.wantReceived(chains, plain(60, 1))
				want := f
				if guest == 0 {
					want = frame{data: whole}
				}
				_, chains = r.wantReceived(chains, want)
				r.wantReceived(chains, plain(61, 2))
			}
			r.finishEarly()
		}
	}
}

// TestReceiveSegments is OFF-03: a guest that cannot take a large frame gets correct
// segments, or the frame is dropped and counted; the next frame flows in all cases.
func TestReceiveSegments(t *testing.T) {
	const payload, size = 64000, 1400
	for _, test := range []struct {
		name     string
		features virtio.Features
		ecn      bool
		whole    bool
		dropped  bool
	}{
		{"B1 takes it", baseFeatures | guestOffloads, false, true, false},
		{"B2 without segmentation", baseFeatures | virtio.FNetGuestCSum, false, false, false},
		{"B2 without anything", baseFeatures, false, false, false},
		{"B2 not mergeable", modernSingle, false, false, false},
		{"B3 buffers too small", modernSingle | guestOffloads, false, false, true},
		{"B4 without ECN", baseFeatures | guestOffloads&^virtio.FNetGuestECN, true, false, false},
	} {
		for _, v6 := range []bool{false, true} {
			p := newFakePort()
			r := newRig(t, p, rigOptions{features: test.features, size: 128})
			f := segmented(t, v6, test.ecn, payload, size)
			var chains []rxBuffer
			for range 128 {
				chains = append(chains, r.offer(1526))
			}
			p.feed(plain(60, 1), f, plain(61, 2))
			r.run()
			_, chains = r.wantReceived(chains, plain(60, 1))
			switch {
			case test.whole:
				_, chains = r.wantReceived(chains, f)
			case test.dropped:
				r.wantDrops(0, map[string]uint64{"rx_buffers_too_small": 1})
			default:
				var got []byte
				if n := r.drops(0); len(n) > 0 {
					t.Fatalf("%s: drops %v", test.name, n)
				}
				for len(got) < payload {
					var s frame
					s, _, chains = r.received(chains)
					if s.hdr.GSOType != 0 || s.hdr.Flags&virtio.HdrFNeedsCsum != 0 {
						t.Fatalf("%s: segment with marks %+v", test.name, s.hdr)
					}
					part := verify(t, s.data)
					if len(part) > size {
						t.Fatalf("%s: segment of %d bytes", test.name, len(part))
					}
					got = append(got, part...)
				}
				if string(got) != string(pattern(payload, 1)) {
					t.Fatalf("%s: payload differs", test.name)
				}
			}
			r.wantReceived(chains, plain(61, 2))
			r.finishEarly()
		}
	}
}

// TestSegmentsWaitForBuffers gives segments fewer buffers than they need at a time.
func TestSegmentsWaitForBuffers(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	p.feed(segmented(t, false, false, 30000, 1000), plain(60, 2))
	var got []byte
	for len(got) < 30000 {
		b := r.offer(1526)
		r.run()
		s, _, _ := r.received([]rxBuffer{b})
		got = append(got, verify(t, s.data)...)
	}
	b := r.offer(1526)
	r.run()
	r.wantReceived([]rxBuffer{b}, plain(60, 2))
}

// TestAllDropped delivers only frames that cannot be finished, to a ring that has never
// been used and to one that has, with and without posted buffers, also after a second has
// passed. The next good frame flows.
func TestAllDropped(t *testing.T) {
	broken := plain(100, 1)
	broken.hdr = virtio.NetHdr{Flags: 1, CsumStart: 0xfff0, CsumOffset: 2}
	for _, features := range []virtio.Features{baseFeatures, modernSingle} {
		for _, buffers := range []int{1, 32, 100, 256} {
			p := newFakePort()
			r := newRig(t, p, rigOptions{features: features})
			var chains []rxBuffer
			for range buffers {
				chains = append(chains, r.offer(1526))
			}
			for n := range 3 {
				p.feed(broken)
				r.run()
				if n == 1 { // a wait from before must not be held against later frames
					r.loop.Do(func() {
						if w := &r.pair().waitSince; !w.IsZero() {
							*w = w.Add(-2 * stuckFrame)
						}
					})
				}
			}
			for range 100 {
				p.feed(broken)
			}
			r.run()
			r.wantDrops(0, map[string]uint64{"csum_out_of_range": 103})
			p.feed(plain(60, 2))
			r.run()
			r.wantReceived(chains, plain(60, 2))
			r.finishEarly()
		}
	}
}

// TestFinishWithoutMemory drops a frame that cannot be finished for want of memory.
func TestFinishWithoutMemory(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures, arena: 1 << 20})
	var hoard []pagemem.PageID
	for id, ok := r.arena.Alloc(0, pagemem.NoReserve); ok; id, ok = r.arena.Alloc(0, pagemem.NoReserve) {
		hoard = append(hoard, id)
	}
	r.arena.Unref(hoard[0], 1) // for the frame itself
	f, whole := unfinished(t, false, true, 1000)
	chains := []rxBuffer{r.offer(1526), r.offer(1526)}
	p.feed(f)
	r.run()
	r.wantDrops(0, map[string]uint64{"no_memory": 1})
	for _, id := range hoard[1:] {
		r.arena.Unref(id, 1)
	}
	p.feed(f)
	r.run()
	r.wantReceived(chains, frame{data: whole})
}

// TestEchoFinishes sends unfinished frames to a network that returns them: the guest gets
// them as its own features say.
func TestEchoFinishes(t *testing.T) {
	const sender = virtio.FNetCSum | virtio.FNetHostTSO4
	for _, guest := range []virtio.Features{0, guestOffloads} {
		r := newRig(t, must(echo.New(echo.Options{})), rigOptions{features: baseFeatures | sender | guest})
		f, whole := unfinished(t, false, false, 500)
		b := r.offer(1526)
		head := r.send(f)
		r.run()
		want := f
		if guest == 0 {
			want = frame{data: whole}
		}
		r.wantReceived([]rxBuffer{b}, want)
		r.wantUsed(1, head)
		r.finishEarly()
	}
}

// TestFinishedFramesStop stops the ring between the segments of a frame.
func TestFinishedFramesStop(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	p.feed(segmented(t, false, false, 30000, 1000), plain(60, 2))
	b := r.offer(1526)
	r.run()
	r.received([]rxBuffer{b})
	if base := r.stop(0); base != 1 {
		t.Errorf("stopped at %d, want 1", base)
	}
	r.wantDrops(0, map[string]uint64{"ring_stopped": 30})
	r.start(0)
	next := r.offer(1526)
	p.feed(plain(62, 3))
	r.kick(0)
	waitFor(t, "a frame after the restart", r.rx.HasUsed)
	r.wantReceived([]rxBuffer{next}, plain(62, 3))
}
