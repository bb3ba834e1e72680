package cases

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// controlled is an ordinary driver that finds a control queue.
const controlled = plain | virtio.FNetMAC | virtio.FNetStatus | virtio.FNetCtrlVQ | virtio.FNetCtrlRX | virtio.FNetCtrlRXExtra |
	virtio.FNetCtrlVLAN | virtio.FNetCtrlMACAddr

// command sends one command and demands an answer of one byte within prompt.
func command(t testing.TB, q *frontend.Queue, want byte, class, cmd byte, data ...byte) {
	t.Helper()
	begin := time.Now()
	answer, n, err := q.Command(class, cmd, data, frontend.Chained, patience)
	must(t, err)
	soon(t, "the answer came", begin)
	if answer != want || n != 1 {
		t.Fatalf("class %d, command %d: answer %d in %d bytes, want %d in 1", class, cmd, answer, n, want)
	}
}

// returns sends a frame from mac to the echo network and says whether it came back.
func returns(t testing.TB, p *frontend.Pair, last byte, vlan ...byte) bool {
	t.Helper()
	_, err := p.PostRx(8)
	must(t, err)
	frame := frameOf(60, last)
	copy(frame[6:], []byte{2, 0, 0, 0, 0, last})
	copy(frame[12:], vlan)
	must(t, p.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
	must(t, p.DrainTx(patience))
	_, got, err := p.RecvFrame(3 * quiet)
	if err == nil && !bytes.Equal(got, swapped(frame)) {
		t.Fatalf("another frame came back: % x", head(got))
	}
	return err == nil
}

// TestControlQueueOfCrosvm plays crosvm: it makes as many virtqueues as GET_QUEUE_NUM says, takes address and configuration from the
// back-end, passes the control queue, and resets a device with SET_VRING_ENABLE 0 and GET_VRING_BASE.
func TestControlQueueOfCrosvm(t *testing.T) {
	d := serve(t, "echo", "--queue-pairs", "4", "--mac", "02:00:00:00:00:07")
	mem := memory(t)
	c := d.connect(mem, frontend.Options{Order: frontend.Crosvm, Features: controlled})
	if c.QueueNum != 9 {
		t.Fatalf("GET_QUEUE_NUM is %d, crosvm makes 9 virtqueues for 4 pairs", c.QueueNum)
	}
	var pairs [4]*frontend.Pair
	var q *frontend.Queue
	start := func() {
		t.Helper()
		for i := range pairs {
			var err error
			pairs[i], err = c.StartPair(i)
			must(t, err)
		}
		var err error
		q, err = c.StartControl(4)
		must(t, err)
		must(t, c.Sync())
	}
	for life := range 2 {
		start()
		space, err := c.GetConfig(0, 12)
		must(t, err)
		if !bytes.Equal(space[:10], []byte{2, 0, 0, 0, 0, 7, 1, 0, 4, 0}) {
			t.Fatalf("life %d: configuration space % x", life, space)
		}
		flows(t, pairs[0])
		if returns(t, pairs[2], 9) {
			t.Error("a pair receives that the driver has not asked for")
		}
		command(t, q, virtio.CtrlOK, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 4, 0)
		if _, _, err := pairs[2].RecvFrame(patience); err != nil {
			t.Errorf("the frame that waited for the pair: %v", err)
		}
		for _, p := range pairs {
			flows(t, p)
		}
		command(t, q, virtio.CtrlErr, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 5, 0)
		command(t, q, virtio.CtrlOK, virtio.CtrlMAC, virtio.CtrlMACAddrSet, 2, 0, 0, 0, 0, 8)
		command(t, q, virtio.CtrlOK, virtio.CtrlRX, virtio.CtrlRXPromisc, 0)
		command(t, q, virtio.CtrlOK, virtio.CtrlVLAN, virtio.CtrlVLANAdd, 5, 0)
		if space, err = c.GetConfig(0, 6); err != nil || space[5] != 8 {
			t.Errorf("address % x, %v", space, err)
		}
		p := pairs[life]
		for i, ok := range []bool{returns(t, p, 8), !returns(t, p, 7), !returns(t, p, 9), returns(t, p, 8, 0x81, 0, 0, 5), !returns(t, p, 8, 0x81, 0, 0, 6)} {
			if !ok {
				t.Errorf("frame %d: filtered wrongly", i)
			}
		}
		command(t, q, virtio.CtrlOK, virtio.CtrlRX, virtio.CtrlRXPromisc, 1)
		if !returns(t, p, 9, 0x81, 0, 0, 6) {
			t.Error("promiscuous mode filters")
		}
		for i := range 9 {
			must(t, c.SetVringEnable(i, false))
			_, err := c.GetVringBase(i)
			must(t, err)
		}
		for _, p := range pairs {
			p.Reset()
		}
		q.Reset()
	}
}

// TestControlQueueOfLibkrun plays libkrun: memory before features, one pair, and a reset by SET_VRING_ENABLE 0 alone, after which
// the control queue is that of a new driver, too.
func TestControlQueueOfLibkrun_C51_C52(t *testing.T) {
	d := serve(t, "echo", "--queue-pairs", "1", "--mac", "02:00:00:00:00:07")
	c := d.connect(memory(t), frontend.Options{Order: frontend.Libkrun, Features: controlled})
	for range 3 {
		p := pair(t, c, 0)
		q, err := c.StartControl(1)
		must(t, err)
		must(t, c.Sync()) // until then the filter of the driver before is in force
		flows(t, p)
		command(t, q, virtio.CtrlErr, virtio.CtrlMQ, virtio.CtrlMQPairsSet, 1, 0) // was not offered
		if !returns(t, p, 9) {
			t.Error("the filter of the driver before is still there")
		}
		command(t, q, virtio.CtrlOK, virtio.CtrlRX, virtio.CtrlRXPromisc, 0)
		if returns(t, p, 9) {
			t.Error("not filtered")
		}
		for i := range 3 {
			must(t, c.SetVringEnable(i, false))
		}
		must(t, c.Sync())
		p.Reset()
		q.Reset()
	}
}

// TestControlQueueNotPassed: a front-end that serves the control queue itself may acknowledge what belongs to it, as
// cloud-hypervisor and virtio-user do; then nothing is filtered and all pairs receive.
func TestControlQueueNotPassed(t *testing.T) {
	d := serve(t, "echo", "--queue-pairs", "2", "--mac", "02:00:00:00:00:07")
	c := d.connect(memory(t), frontend.Options{Order: frontend.CloudHypervisor, Features: controlled})
	for i := range 2 {
		p := pair(t, c, i)
		flows(t, p)
		if !returns(t, p, 9, 0x81, 0, 0, 6) {
			t.Error("filtered although nobody asked for it")
		}
	}
}

// TestControlQueueIndex_A9: with the largest number of pairs that leaves an index for it, the control queue has the last ring.
func TestControlQueueIndex_A9(t *testing.T) {
	for _, pairs := range []int{127, 128} {
		d := serve(t, "echo", "--queue-pairs", fmt.Sprint(pairs), "--mac", "02:00:00:00:00:07")
		c := d.connect(memory(t), frontend.Options{Order: frontend.Crosvm, Features: controlled})
		if want := min(256, 2*pairs+1); c.QueueNum != want {
			t.Errorf("GET_QUEUE_NUM is %d for %d pairs, want %d", c.QueueNum, pairs, want)
		}
		p := pair(t, c, pairs-1)
		q, err := c.StartControl(pairs)
		must(t, err)
		if pairs == 127 {
			command(t, q, virtio.CtrlOK, virtio.CtrlMQ, virtio.CtrlMQPairsSet, byte(pairs), 0)
		}
		must(t, c.Sync())
		flows(t, p)
	}
}

// TestC50_ResetDevice: a reset under load, twice, and before anything was negotiated; each time the device starts again on the same
// connection and memory.
func TestC50_ResetDevice(t *testing.T) {
	d := serve(t, "echo", "--queue-pairs", "2")
	c := d.dial()
	must(t, c.SetProtocolFeatures(vhostuser.ProtoMQ|vhostuser.ProtoReplyAck|vhostuser.ProtoStatus|vhostuser.ProtoResetDevice))
	c.NeedReply = true
	reset := func() error { return c.DoAck(vhostuser.ReqResetDevice, nil) }
	steps(t, reset, reset)
	mem := memory(t)
	must(t, share(c, mem))
	var base use
	p := detached(t, mem, 1, plain)
	for round := range rounds(6, 200) {
		must(t, c.SetFeatures(plain|virtio.FVhostUserProtocolFeatures))
		steps(t, rings(c, p), on(c, 2, 3))
		flows(t, p)
		_, err := p.PostRx(100)
		must(t, err)
		for range 64 {
			must(t, p.Stage(virtio.NetHdr{}, frameOf(1400, 1), frontend.Direct))
		}
		must(t, p.TX.Flush())
		steps(t, reset, reset)
		for _, r := range d.status().Rings {
			if r.Started || r.Enabled {
				t.Fatalf("after the reset: %+v", r)
			}
		}
		p.Reset()
		if round == 0 {
			base = d.use()
		}
	}
	d.flat(base)
	for range 100 {
		_ = reset()
	}
	must(t, c.Close())
	d.disconnected()
	d.serves()
}

// TestHostileC81_Config: ranges that are no ranges, and writes to what cannot be written.
func TestHostileC81_Config(t *testing.T) {
	d := serve(t, "echo", "--mac", "02:00:00:00:00:07")
	c := d.dial()
	must(t, c.SetProtocolFeatures(vhostuser.ProtoReplyAck|vhostuser.ProtoConfig|vhostuser.ProtoResetDevice))
	c.NeedReply = true
	must(t, c.SetFeatures(controlled&^virtio.FNetMQ|virtio.FVhostUserProtocolFeatures))
	for _, r := range [][2]uint32{{0, 0}, {0, 25}, {24, 1}, {0, 257}, {0xffffffff, 1}, {0xffffffff, 0xffffff00}, {23, 2}} {
		size := min(r[1], 4000)
		msg := append(vhostuser.ConfigSpace{Offset: r[0], Size: r[1]}.Append(nil), make([]byte, size)...)
		if b, err := c.Call(vhostuser.ReqGetConfig, msg); err != nil || len(b) != 0 {
			t.Errorf("read of %d bytes at %d: %d bytes, %v; want the empty reply", r[1], r[0], len(b), err)
		}
		for _, flags := range []uint32{0, 1, 2, 4} {
			msg := append(vhostuser.ConfigSpace{Offset: r[0], Size: r[1], Flags: flags}.Append(nil), make([]byte, size)...)
			mustRefuse(t, fmt.Sprintf("write of %d bytes at %d, flags %d", r[1], r[0], flags), c.DoAck(vhostuser.ReqSetConfig, msg))
		}
	}
	for offset := range uint32(24) {
		mustRefuse(t, fmt.Sprintf("write to byte %d", offset), c.SetConfig(offset, []byte{0x55}, 0))
	}
	must(t, c.SetConfig(0, []byte{2, 0, 0, 0, 0, 9}, 2)) // from the device of another host
	if b, err := c.GetConfig(0, 6); err != nil || b[5] != 9 {
		t.Errorf("address % x, %v", b, err)
	}
	must(t, c.DoAck(vhostuser.ReqResetDevice, nil))
	if b, err := c.GetConfig(0, 6); err != nil || b[5] != 7 {
		t.Errorf("address % x after a reset, %v", b, err)
	}
	must(t, c.SetFeatures(virtio.FVhostUserProtocolFeatures)) // a legacy driver writes byte by byte
	for i, v := range []byte{2, 0, 0, 0, 0, 6} {
		must(t, c.SetConfig(uint32(i), []byte{v}, 1))
	}
	if b, err := c.GetConfig(0, 6); err != nil || b[5] != 6 {
		t.Errorf("address % x, %v", b, err)
	}
}
