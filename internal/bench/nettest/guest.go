package nettest

import (
	"errors"
	"fmt"
	"time"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// guest is a front-end with the driver of one queue pair.
type guest struct {
	opts     Options
	conn     *frontend.Conn
	mem      *frontend.Memory
	features virtio.Features
	protocol vhostuser.ProtocolFeatures
	rx       *rxQueue
	tx       txQueue
}

// wanted are the features that the options ask for; what must be there is said by missing.
func (o Options) wanted() virtio.Features {
	f := virtio.FVersion1 | virtio.FVhostUserProtocolFeatures
	for bit, on := range map[virtio.Features]bool{
		virtio.FRingPacked: o.Ring == "packed", virtio.FRingEventIdx: o.EventIdx, virtio.FRingIndirectDesc: o.Indirect,
		virtio.FInOrder: o.InOrder, virtio.FNetMrgRxBuf: o.Mrg,
	} {
		if on {
			f |= bit
		}
	}
	return f
}

// missing are the features that the run is about and the back-end does not have.
func (o Options) missing(acked virtio.Features) virtio.Features {
	needs := o.wanted() &^ (virtio.FVhostUserProtocolFeatures | virtio.FRingEventIdx | virtio.FRingIndirectDesc)
	if o.Layout == "indirect" {
		needs |= virtio.FRingIndirectDesc
	}
	return needs &^ acked
}

// buffers are the bytes of a receive and of a transmit buffer.
func (o Options) buffers() (rx, tx int) {
	tx = virtio.NetHdrLen + o.longest()
	if o.Wire == Tap {
		tx = max(tx, 2048) // other frames come as well
	}
	if rx = tx; o.Mrg {
		rx = min(rx, 2048)
	}
	return rx, tx
}

// connect makes a guest whose rings run.
func connect(path string, o Options) (g *guest, err error) {
	conn, err := dialUntil(path, 5*time.Second)
	if err != nil {
		return nil, err
	}
	g = &guest{opts: o, conn: conn}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", path, err), g.close())
		}
	}()
	if err := g.negotiate(); err != nil {
		return g, err
	}
	if err := g.share(); err != nil {
		return g, err
	}
	for _, q := range [...]*queue{g.rx.queue, g.tx.queue} {
		if err := g.startRing(q); err != nil {
			return g, err
		}
	}
	if err := g.conn.Sync(); err != nil {
		return g, err
	}
	return g, g.rx.post()
}

// dialUntil waits for a back-end that is about to listen.
func dialUntil(path string, wait time.Duration) (*frontend.Conn, error) {
	for end := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		conn, err := frontend.Dial(path)
		if err == nil || time.Now().After(end) {
			return conn, err
		}
	}
}

func (g *guest) negotiate() error {
	offered, err := g.conn.GetFeatures()
	if err != nil {
		return err
	}
	g.features = offered & g.opts.wanted()
	if missing := g.opts.missing(g.features); missing != 0 {
		return fmt.Errorf("the back-end does not offer %v", missing)
	}
	if g.features.Has(virtio.FVhostUserProtocolFeatures) {
		if g.protocol, err = g.conn.GetProtocolFeatures(); err != nil {
			return err
		}
		g.protocol &= vhostuser.ProtoMQ | vhostuser.ProtoReplyAck
		if err := g.conn.SetProtocolFeatures(g.protocol); err != nil {
			return err
		}
	}
	return errors.Join(g.conn.SetOwner(), g.conn.SetFeatures(g.features))
}

// share makes the memory, tells the back-end of it and makes the rings.
func (g *guest) share() (err error) {
	rxBytes, txBytes := g.opts.buffers()
	packed := g.features.Has(virtio.FRingPacked)
	rxRings, rxBuffers := queueMemory(g.opts.RingSize, rxBytes, packed)
	txRings, txBuffers := queueMemory(g.opts.RingSize, txBytes, packed)
	if g.mem, err = newMemory(rxRings+txRings+pageSize, rxBuffers+txBuffers+pageSize); err != nil {
		return err
	}
	specs, fds := g.mem.Table()
	if g.protocol&vhostuser.ProtoReplyAck != 0 {
		err = g.conn.DoAck(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, specs), fds...)
	} else {
		err = g.conn.SetMemTable(specs, fds)
	}
	if err != nil {
		return err
	}
	rx, err := newQueue(g, 0, rxBytes)
	if err != nil {
		return err
	}
	g.rx = &rxQueue{queue: rx, several: g.features.Has(virtio.FNetMrgRxBuf), lenient: g.opts.Socket != ""}
	tx, err := newQueue(g, 1, txBytes)
	g.tx = txQueue{tx}
	return err
}

func (g *guest) startRing(q *queue) error {
	base := uint32(0)
	if q.packed {
		base = freshPacked
	}
	for _, step := range []func() error{
		func() error { return g.conn.SetVringNum(q.index, uint32(q.ring.Size())) },
		func() error { return g.conn.SetVringBase(q.index, base) },
		func() error { return g.conn.SetVringAddr(q.addr()) },
		func() error { return g.conn.SetVringErr(q.index, q.fail) },
		func() error { return g.conn.SetVringCall(q.index, q.call) },
		func() error { return g.conn.SetVringKick(q.index, q.kick) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	if g.features.Has(virtio.FVhostUserProtocolFeatures) {
		return g.conn.SetVringEnable(q.index, true)
	}
	return nil
}

// stopRing stops a ring and wants the back-end's position to be exact: what it took it has given back. A ring that is disabled
// first consumes what is on it.
func (g *guest) stopRing(q *queue) error {
	position, err := g.conn.GetVringBase(q.index)
	if err != nil {
		return err
	}
	for {
		want := uint32(q.ring.LastUsed())
		if q.packed {
			want |= want << 16
		}
		// DPDK leaves the upper half away, which can only be as the lower one.
		short := q.packed && g.opts.Socket != "" && position>>16 == 0 && position == want&0xffff
		if position == want || short {
			return nil
		}
		// Used chains that were not taken yet are ahead of the driver's position, which only taking moves.
		if !q.ring.HasUsed() {
			return fmt.Errorf("ring %d stopped at %#x, used up to %#x", q.index, position, want)
		}
		if err := q.retire(); err != nil {
			return err
		}
	}
}

// retire takes back one chain of a transmitq that is stopped.
func (q *queue) retire() error {
	i, _, ok, err := q.take()
	if err != nil || !ok || q.writable() {
		return errors.Join(err, fmt.Errorf("ring %d: a frame came while its ring was stopped", q.index))
	}
	fill(q.buffers[i].data, overwritten)
	q.free = append(q.free, i)
	return nil
}

// finish stops the rings in order and looks for what the back-end wrote where it must not. What is still under way is sent first.
func (g *guest) finish() error {
	for _, q := range [...]*queue{g.tx.queue, g.rx.queue} {
		q.called()
		if g.features.Has(virtio.FVhostUserProtocolFeatures) {
			if err := g.conn.SetVringEnable(q.index, false); err != nil {
				return err
			}
		}
		if err := g.stopRing(q); err != nil && !(q == g.rx.queue && g.opts.Wire == Tap) { // a tap has frames of its own
			return err
		}
		if err := q.intact(); err != nil {
			return err
		}
	}
	return nil
}

func (g *guest) close() error {
	errs := []error{g.conn.Close()}
	if g.rx != nil {
		errs = append(errs, g.rx.close())
	}
	if g.tx.queue != nil {
		errs = append(errs, g.tx.close())
	}
	if g.mem != nil {
		errs = append(errs, g.mem.Close())
	}
	return errors.Join(errs...)
}
