package cases

import (
	"fmt"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// TestNEG01_RingsEnabledBeforeTheyExist: the enable bit is remembered per index, whatever the order of the messages.
func TestNEG01_RingsEnabledBeforeTheyExist(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	for name, order := range map[string]func(c *frontend.Conn, p *frontend.Pair) error{
		"enable first, as QEMU": func(c *frontend.Conn, p *frontend.Pair) error {
			return first(c.SetOwner, proto(c), calls(c, p), on(c, 0, 1), features(c), memTable(c, mem), rings(c, p), calls(c, p))
		},
		"enable last": func(c *frontend.Conn, p *frontend.Pair) error {
			return first(c.SetOwner, proto(c), features(c), memTable(c, mem), rings(c, p), on(c, 0, 1))
		},
		"enable twice": func(c *frontend.Conn, p *frontend.Pair) error {
			return first(c.SetOwner, proto(c), on(c, 0, 1), features(c), memTable(c, mem), on(c, 0, 1), rings(c, p), on(c, 0, 1))
		},
		"memory before features and one call descriptor, as libkrun": func(c *frontend.Conn, p *frontend.Pair) error {
			oneCall := func() error { return first(rings(c, p), func() error { return c.SetVringCall(1, p.RX.CallFD) }) }
			return first(proto(c), c.SetOwner, memTable(c, mem), features(c), oneCall, on(c, 0, 1))
		},
		"features and memory last": func(c *frontend.Conn, p *frontend.Pair) error {
			return first(c.SetOwner, proto(c), on(c, 0, 1), rings(c, p), features(c), memTable(c, mem))
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, p := d.dial(), detached(t, mem, 0, plain)
			must(t, order(c, p))
			must(t, c.Sync())
			want := frameOf(60, 1)
			_, err := p.PostRx(4)
			must(t, err)
			must(t, p.SendTx(virtio.NetHdr{}, want, frontend.Direct))
			expect(t, p, want)
			must(t, c.Close())
			d.disconnected()
		})
	}
}

// TestNEG01_OrdersOfFrontEnds sends whole sequences as the front-ends do, twice on each socket.
func TestNEG01_OrdersOfFrontEnds(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	for name, order := range map[string]frontend.Order{"QEMU": frontend.QEMU, "DPDK": frontend.DPDK, "cloud-hypervisor": frontend.CloudHypervisor} {
		t.Run(name, func(t *testing.T) {
			for _, features := range []virtio.Features{plain, 0} { // 0: all that is offered
				c := d.connect(mem, frontend.Options{Order: order, Features: features})
				p := pair(t, c, 0)
				flows(t, p)
				_, _, err := c.Stop(0)
				must(t, err)
				flows(t, pair(t, c, 0))
				flows(t, pair(t, c, 1))
				must(t, c.Close())
				d.disconnected()
			}
		})
	}
}

// TestNEG03_FeaturesAgainOnRunningRings: the same features change nothing, others are refused while a ring runs.
func TestNEG03_FeaturesAgainOnRunningRings(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	traffic := startLoad(t, p)
	acked := plain | virtio.FVhostUserProtocolFeatures
	for range rounds(50, 1000) {
		must(t, c.SetFeatures(acked))
		must(t, c.SetFeatures(acked|virtio.FVhostLogAll))
		must(t, c.SetFeatures(acked))
		mustRefuse(t, "MRG_RXBUF flipped on running rings", c.SetFeatures(acked^virtio.FNetMrgRxBuf))
		mustRefuse(t, "EVENT_IDX flipped on running rings", c.SetFeatures(acked^virtio.FRingEventIdx))
		time.Sleep(time.Millisecond)
	}
	t.Logf("%d frames", traffic.end(t))
	if got := d.status().Features; len(got) != len(acked.Names()) {
		t.Errorf("features %v, want %v", got, acked.Names())
	}
	if p.RX.Ring.PeekUsedIdx() != p.RX.Ring.LastUsed() || p.TX.Ring.PeekUsedIdx() != p.TX.Ring.AvailIdx() {
		t.Error("an index jumped")
	}
	flows(t, p)
}

// TestNEG04_ExactlyOneReplyWithFlags5 judges every reply as QEMU does, whether need_reply was set or not.
func TestNEG04_ExactlyOneReplyWithFlags5(t *testing.T) {
	d := serve(t, "echo", "--mac", "02:00:00:00:00:07")
	c := d.dial()
	all := vhostuser.ProtoMQ | vhostuser.ProtoReplyAck | vhostuser.ProtoStatus | vhostuser.ProtoConfig | vhostuser.ProtoMemSlots
	must(t, c.SetProtocolFeatures(all))
	config := append(vhostuser.ConfigSpace{Size: 17, Flags: 1}.Append(nil), make([]byte, 17)...)
	for _, m := range []struct {
		req     vhostuser.Request
		payload []byte
		size    int
	}{
		{vhostuser.ReqGetFeatures, nil, 8}, {vhostuser.ReqGetProtocolFeatures, nil, 8}, {vhostuser.ReqGetQueueNum, nil, 8},
		{vhostuser.ReqGetVringBase, vhostuser.VringState{Index: 1}.Append(nil), 8}, {vhostuser.ReqGetStatus, nil, 8},
		{vhostuser.ReqGetConfig, config, len(config)}, {vhostuser.ReqGetMaxMemSlots, nil, 8},
	} {
		for _, flags := range []uint32{vhostuser.FlagVersion, vhostuser.FlagVersion | vhostuser.FlagNeedReply} {
			must(t, c.Send(m.req, flags, m.payload))
			must(t, c.Send(vhostuser.ReqGetFeatures, vhostuser.FlagVersion, nil)) // its reply must be the next one
			for _, want := range []struct {
				req  vhostuser.Request
				size int
			}{{m.req, m.size}, {vhostuser.ReqGetFeatures, 8}} {
				r, err := c.Recv(patience)
				must(t, err)
				if r.Request != want.req || r.Flags != vhostuser.FlagVersion|vhostuser.FlagReply || len(r.Payload) != want.size || len(r.FDs) != 0 {
					t.Errorf("%v with flags %#x: reply %v, flags %#x, %d bytes, %d descriptors; want %v, 0x5, %d bytes, none",
						m.req, flags, r.Request, r.Flags, len(r.Payload), len(r.FDs), want.req, want.size)
				}
			}
		}
	}
	mustRefuse(t, "SET_LOG_BASE without LOG_SHMFD", c.DoAck(vhostuser.ReqSetLogBase, make([]byte, 16)))
	must(t, c.DoAck(vhostuser.ReqSetOwner, nil))
	must(t, c.Close())
	d.disconnected()
	for _, req := range []vhostuser.Request{vhostuser.ReqGetMaxMemSlots, vhostuser.ReqGetSharedObject, vhostuser.ReqGetShmemConfig} {
		c := d.dial()
		payload := make([]byte, map[vhostuser.Request]int{vhostuser.ReqGetSharedObject: 16}[req])
		must(t, c.Send(req, vhostuser.FlagVersion, payload))
		if err := c.AwaitClose(patience); err != nil {
			t.Errorf("%v, whose reply cannot be given: %v", req, err)
		}
		d.disconnected()
	}
	d.serves()
}

// TestNEG06_OffersOnlyWhatIsServed names every bit that may be offered; each of them has tests of its own.
func TestNEG06_OffersOnlyWhatIsServed(t *testing.T) {
	const ringBits = virtio.FVersion1 | virtio.FRingIndirectDesc | virtio.FRingEventIdx | virtio.FAnyLayout | virtio.FInOrder | virtio.FRingPacked |
		virtio.FNetMrgRxBuf | virtio.FNetMTU | virtio.FNetMQ | virtio.FAccessPlatform | virtio.FVhostUserProtocolFeatures | virtio.FVhostLogAll |
		virtio.FNetCtrlVQ | virtio.FNetCtrlRX | virtio.FNetCtrlRXExtra | virtio.FNetCtrlVLAN | virtio.FNetCtrlMACAddr | virtio.FNetCtrlGuestOffloads
	const transmit = virtio.FNetCSum | virtio.FNetGSO | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN | virtio.FNetHostUFO
	const receive = virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN | virtio.FNetGuestUFO
	const protocol = vhostuser.ProtoMQ | vhostuser.ProtoRARP | vhostuser.ProtoReplyAck | vhostuser.ProtoNetMTU | vhostuser.ProtoInflight | vhostuser.ProtoMemSlots | vhostuser.ProtoStatus |
		vhostuser.ProtoResetDevice | vhostuser.ProtoBackendReq | vhostuser.ProtoLogShmfd | vhostuser.ProtoDeviceState
	for network, extra := range map[string]virtio.Features{"echo": transmit | receive, "null": transmit | receive, "source": transmit | receive} {
		t.Run(network, func(t *testing.T) {
			d := serve(t, network)
			c := d.dial()
			got, err := c.GetFeatures()
			must(t, err)
			if more := got &^ (ringBits | extra); more != 0 {
				t.Errorf("offers %v (%#x)", more, uint64(more))
			}
			if missing := ringBits &^ got; missing != 0 {
				t.Errorf("does not offer %v", missing)
			}
			offered, err := c.GetProtocolFeatures()
			must(t, err)
			if offered != protocol {
				t.Errorf("protocol features %v, want %v", offered, protocol)
			}
			must(t, c.SetProtocolFeatures(offered))
			mustRefuse(t, "a protocol feature that is not offered", c.DoAck(vhostuser.ReqSetProtocolFeatures, word(uint64(offered|vhostuser.ProtoInband))))
			for bit := range 64 {
				f := virtio.Features(1) << bit
				err := c.DoAck(vhostuser.ReqSetFeatures, word(uint64(f|virtio.FVhostUserProtocolFeatures|virtio.FVersion1)))
				if got&f != 0 && !dependent(f) {
					must(t, err)
				} else if got&f == 0 {
					mustRefuse(t, fmt.Sprintf("feature bit %d, which is not offered", bit), err)
				}
			}
			for _, f := range []virtio.Features{got, got &^ virtio.FNetCtrlVQ} {
				must(t, c.DoAck(vhostuser.ReqSetFeatures, word(uint64(f))))
			}
		})
	}
}

// dependent says whether a feature alone is nonsense (virtio 1.3, 5.1.3.1), so that either answer is right.
func dependent(f virtio.Features) bool {
	const needs = virtio.FNetGSO | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN | virtio.FNetHostUFO |
		virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN | virtio.FNetGuestUFO
	return f&needs != 0
}

// TestNEG07_EnableActsOnOneRing: the index of SET_VRING_ENABLE is a ring, not a pair.
func TestNEG07_EnableActsOnOneRing(t *testing.T) {
	t.Run("without MQ", func(t *testing.T) {
		d := serve(t, "echo")
		mem := memory(t)
		c := d.session(mem, plain&^virtio.FNetMQ)
		must(t, enable(c, true, 1))
		p := detached(t, mem, 0, plain)
		steps(t, rings(c, p), on(c, 0))
		flows(t, p)
	})
	t.Run("transmit of pair 1 alone", func(t *testing.T) {
		d := serve(t, "echo", "--queue-pairs", "4")
		c := d.connect(memory(t), frontend.Options{Features: plain, NeedReply: true})
		var pairs [4]*frontend.Pair
		for i := range pairs {
			pairs[i] = pair(t, c, i)
		}
		must(t, c.SetVringEnable(3, false))
		for i, p := range pairs {
			if i != 1 {
				flows(t, p)
				continue
			}
			_, err := p.PostRx(4)
			must(t, err)
			must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			must(t, p.DrainTx(patience))
			nothing(t, p.RX)
		}
		if n := d.drops(3); n != 1 {
			t.Errorf("%d frames of the disabled ring counted as dropped, want 1", n)
		}
		must(t, c.SetVringEnable(3, true))
		for _, p := range pairs {
			flows(t, p)
		}
	})
	t.Run("receive goes on", func(t *testing.T) {
		d := serve(t, "source,rate=1000", "--queue-pairs", "4")
		c := d.connect(memory(t), frontend.Options{Features: plain, NeedReply: true})
		var pairs [4]*frontend.Pair
		for i := range pairs {
			pairs[i] = pair(t, c, i)
		}
		must(t, c.SetVringEnable(3, false))
		for i, p := range pairs {
			_, err := p.PostRx(4)
			must(t, err)
			if _, _, err := p.RecvFrame(patience); err != nil {
				t.Errorf("pair %d: %v", i, err)
			}
		}
	})
}

// TestNEG09_NoDescriptorAttached: bit 8 of the vring descriptor messages is legal. Only SET_VRING_KICK refuses it, because
// a ring without a kick descriptor would have to be polled.
func TestNEG09_NoDescriptorAttached(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	flows(t, p)
	base := d.use()
	for range 10 {
		for _, q := range []*frontend.Queue{p.RX, p.TX} {
			must(t, c.SetVringCall(q.Index, -1))
			must(t, c.SetVringErr(q.Index, -1))
			mustRefuse(t, "SET_VRING_KICK without a descriptor", c.SetVringKick(q.Index, -1))
			for req, payload := range map[vhostuser.Request]uint64{
				vhostuser.ReqSetVringCall: 0, vhostuser.ReqSetVringKick: 0, vhostuser.ReqSetVringErr: 0,
			} {
				mustRefuse(t, "no descriptor although one is announced", c.DoAck(req, word(payload|uint64(q.Index))))
				mustRefuse(t, "a descriptor although none is announced", c.DoAck(req, word(0x100|uint64(q.Index)), q.ErrFD))
				mustRefuse(t, "unknown bits", c.DoAck(req, word(0x200|uint64(q.Index)), q.ErrFD))
				mustRefuse(t, "two descriptors", c.DoAck(req, word(uint64(q.Index)), q.ErrFD, q.ErrFD))
			}
		}
	}
	d.flat(base)
	if n := d.logged("refused"); n > 3 {
		t.Errorf("%d lines in the log about three kinds of message", n)
	}
	silent(t, p)
	for _, q := range []*frontend.Queue{p.RX, p.TX} {
		must(t, c.SetVringCall(q.Index, q.CallFD))
	}
	flows(t, p)
}

// silent demands that a frame flows although the rings have no call descriptor.
func silent(t *testing.T, p *frontend.Pair) {
	t.Helper()
	drainEvents(t, p)
	_, err := p.PostRx(4)
	must(t, err)
	must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 3), frontend.Direct))
	eventually(t, "the frame comes back without a call", func() bool {
		_, _, ok, err := p.TryRecv()
		must(t, err)
		return ok
	})
	for _, q := range []*frontend.Queue{p.RX, p.TX} {
		if q.WaitCall(quiet) == nil {
			t.Errorf("ring %d: a call on a descriptor that was taken away", q.Index)
		}
	}
}

// TestNEG12_QueueNumServesBothReadings: the answer counts rings with the control queue, and twice as many can be configured for a
// front-end that takes it as pairs.
func TestNEG12_QueueNumServesBothReadings(t *testing.T) {
	for _, pairs := range []int{1, 2, 4, 8, 16, 128} {
		t.Run(fmt.Sprint(pairs), func(t *testing.T) {
			d := serve(t, "echo", "--queue-pairs", fmt.Sprint(pairs))
			mem := memory(t)
			c := d.session(mem, plain&^mqUnless(pairs))
			n, err := c.GetQueueNum()
			must(t, err)
			if n != min(2*pairs+1, vhostuser.MaxSessionRings) {
				t.Fatalf("GET_QUEUE_NUM is %d for %d pairs", n, pairs)
			}
			p := detached(t, mem, 0, plain)
			accepted := min(2*n, vhostuser.MaxSessionRings)
			for i := range accepted {
				steps(t, func() error { return c.SetVringNum(i, 256) }, func() error { return c.SetVringBase(i, 0) },
					func() error { return c.SetVringCall(i, p.RX.CallFD) }, on(c, i))
			}
			for _, i := range []int{accepted, accepted + 1, 255 + 1, 1 << 16, 1<<31 - 1} {
				mustRefuse(t, fmt.Sprintf("SET_VRING_NUM of ring %d", i), c.SetVringNum(i, 256))
			}
			steps(t, rings(c, p))
			flows(t, p)
		})
	}
}

// mqUnless is MQ for a device of one pair, which does not offer it.
func mqUnless(pairs int) virtio.Features {
	if pairs == 1 {
		return virtio.FNetMQ
	}
	return 0
}
