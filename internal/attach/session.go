package attach

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

const (
	// answerWithin bounds the wait for each answer of the back-end.
	answerWithin = 10 * time.Second
	// stopWithin is that at the end.
	stopWithin = time.Second
)

// session is one connection to the back-end.
type session struct {
	opts     *Options
	conn     *frontend.Conn
	features virtio.Features
	protocol vhostuser.ProtocolFeatures
	pairs    int
	mac      net.HardwareAddr // of the device, nil: unknown
	mtu      int              // of the device, 0: unknown

	mem     *frontend.Memory
	running []*pair
	failure *failure
}

// dial connects and negotiates.
func dial(ctx context.Context, o *Options) (s *session, err error) {
	conn, err := frontend.Dial(o.Socket)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.Socket, explainDial(err))
	}
	conn.Timeout = answerWithin
	s = &session{opts: o, conn: conn, pairs: 1, failure: newFailure()}
	defer s.abortWith(ctx)()
	if err := s.negotiate(); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", o.Socket, explainPeer(err)), s.close())
	}
	return s, nil
}

// abortWith closes the connection when ctx is done, so that nothing waits for an answer any more, until the result is called.
func (s *session) abortWith(ctx context.Context) (done func()) {
	stop := context.AfterFunc(ctx, func() { _ = s.conn.Close() })
	return func() { stop() }
}

func explainDial(err error) error {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("%w (no back-end listens there)", err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w (this user may not connect to the back-end)", err)
	}
	return err
}

// explainPeer names what the end of a connection means.
func explainPeer(err error) error {
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET):
		return fmt.Errorf("the back-end closed the connection: %w", err)
	case errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		return fmt.Errorf("the back-end does not answer: %w", err)
	}
	return err
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// negotiate agrees on everything that the interface depends on. The order of messages is that of DPDK's virtio-user.
func (s *session) negotiate() error {
	if err := s.conn.SetOwner(); err != nil {
		return err
	}
	offered, err := s.conn.GetFeatures()
	if err != nil {
		return err
	}
	s.features = choose(offered, s.opts)
	if s.features.Has(virtio.FVhostUserProtocolFeatures) {
		if err := s.negotiateProtocol(); err != nil {
			return err
		}
	}
	if err := s.readConfig(); err != nil {
		return err
	}
	if s.pairs == 1 {
		s.features &^= virtio.FNetMQ
	}
	return s.conn.SetFeatures(s.features)
}

func (s *session) negotiateProtocol() error {
	offered, err := s.conn.GetProtocolFeatures()
	if err != nil {
		return err
	}
	s.protocol = offered & protocolWishes
	if err := s.conn.SetProtocolFeatures(s.protocol); err != nil {
		return err
	}
	s.conn.NeedReply = true // where REPLY_ACK is acknowledged
	if !s.features.Has(virtio.FNetMQ) || s.protocol&vhostuser.ProtoMQ == 0 {
		return nil
	}
	n, err := s.conn.GetQueueNum()
	if err != nil {
		return err
	}
	// Some count queues, some pairs; QEMU takes the number for pairs, so that every back-end bears it.
	s.pairs = max(1, min(s.opts.QueuePairs, n))
	return nil
}

// readConfig asks for the device's configuration. A back-end that has none answers with nothing.
func (s *session) readConfig() error {
	wanted := s.features & (virtio.FNetMAC | virtio.FNetMTU | virtio.FNetMQ)
	if s.protocol&vhostuser.ProtoConfig == 0 || wanted == 0 {
		s.features &^= virtio.FNetMAC | virtio.FNetMTU // nothing says what they are
		return nil
	}
	const size = 12 // mac, status, max_virtqueue_pairs and mtu (virtio 1.3 section 5.1.4)
	ask := vhostuser.ConfigSpace{Size: size}.Append(nil)
	b, err := s.conn.Call(vhostuser.ReqGetConfig, append(ask, make([]byte, size)...))
	if err != nil {
		return fmt.Errorf("configuration of the device: %w", err)
	}
	if len(b) != len(ask)+size {
		s.opts.Logger.Warn("the back-end does not tell the device's configuration", "bytes", len(b), "wanted", len(ask)+size)
		s.features &^= virtio.FNetMAC | virtio.FNetMTU
		return nil
	}
	b = b[len(ask):]
	if mac := net.HardwareAddr(b[:6:6]); wanted.Has(virtio.FNetMAC) && usableMAC(mac) {
		s.mac = mac
	}
	if n := int(binary.LittleEndian.Uint16(b[8:])); wanted.Has(virtio.FNetMQ) && n > 0 {
		s.pairs = min(s.pairs, n)
	}
	if mtu := int(binary.LittleEndian.Uint16(b[10:])); wanted.Has(virtio.FNetMTU) && mtu >= MinMTU {
		s.mtu = min(mtu, MaxMTU)
	}
	if s.opts.MTU > s.mtu {
		s.features &^= virtio.FNetMTU // who acknowledges it promises to stay below (virtio 1.3 section 5.1.5)
	}
	return nil
}

// start shares memory and starts the rings of a pair for each of the taps, whose frames they carry from then on.
func (s *session) start(taps []int, mtu int, counts []*traffic) error {
	steps := []func() error{func() error { return s.share(taps, mtu, counts) }, s.startRings, s.enable}
	// When this is answered all of it has been handled, also by a back-end without acknowledgements.
	err := inOrder(append(steps, s.conn.Sync)...)
	for _, p := range s.running {
		if err == nil {
			err = p.start(s.opts)
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", s.opts.Socket, explainPeer(err))
	}
	return nil
}

// share makes memory and rings and tells the back-end of the memory.
func (s *session) share(taps []int, mtu int, counts []*traffic) (err error) {
	if s.protocol&vhostuser.ProtoNetMTU != 0 && s.features.Has(virtio.FNetMTU) {
		if err := s.conn.NetSetMTU(uint64(mtu)); err != nil {
			return err
		}
	}
	rx, packed := rxBuffer(s.features, mtu), s.features.Has(virtio.FRingPacked)
	bytes := uint64(len(taps)) * (queueBytes(s.opts, packed, rx) + queueBytes(s.opts, packed, txBuffer))
	if s.mem, err = frontend.NewMemory((bytes + 4095) &^ 4095); err != nil {
		return err
	}
	// A file that could be cut would let the back-end end this process. Nor may it add seals of its own.
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(s.mem.Regions[0].FD), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("seal the shared memory: %w", err)
	}
	for i, tap := range taps {
		r, err := newQueue(s.mem, 2*i, s.features, s.opts, rx, &counts[i].received)
		if err != nil {
			return err
		}
		t, err := newQueue(s.mem, 2*i+1, s.features, s.opts, txBuffer, &counts[i].sent)
		if err != nil {
			return errors.Join(err, r.close())
		}
		s.running = append(s.running, newPair(r, t, tap, s.features, s.failure.tell))
	}
	return s.conn.SetMemTable(s.mem.Table())
}

// inOrder runs steps up to the first that fails.
func inOrder(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) startRings() error {
	for _, p := range s.running {
		for _, q := range [...]*queue{p.rx, p.tx} {
			err := inOrder(
				func() error { return s.conn.SetVringNum(q.index, uint32(q.ring.Size())) },
				func() error { return s.conn.SetVringBase(q.index, q.position) },
				func() error { return s.conn.SetVringAddr(q.addr(s.mem)) },
				func() error { return s.conn.SetVringErr(q.index, q.fail) },
				func() error { return s.conn.SetVringCall(q.index, q.call) },
				func() error { return s.conn.SetVringKick(q.index, q.kick) })
			if err != nil {
				return fmt.Errorf("ring %d: %w", q.index, err)
			}
		}
	}
	return nil
}

// enable enables all rings. Without PROTOCOL_FEATURES they are from the start.
func (s *session) enable() error {
	if !s.features.Has(virtio.FVhostUserProtocolFeatures) {
		return nil
	}
	for i := range 2 * len(s.running) {
		if err := s.conn.SetVringEnable(i, true); err != nil {
			return err
		}
	}
	return nil
}

// errorsEvery is how often the err eventfds are looked at where the workers poll, which do not look at descriptors.
const errorsEvery = time.Second

// wait returns when the connection or a ring cannot be used any more, and why, or nil when ctx is done.
func (s *session) wait(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.conn.AwaitEnd(ctx) }()
	var look <-chan time.Time
	if s.opts.Wake == worker.Poll {
		ticker := time.NewTicker(errorsEvery)
		defer ticker.Stop()
		look = ticker.C
	}
	for {
		select {
		case <-look:
			s.lookForErrors()
		case err := <-s.failure.ch:
			cancel()
			<-ended
			return fmt.Errorf("%s: %w", s.opts.Socket, err)
		case err := <-ended:
			cancel()
			if err != nil {
				return fmt.Errorf("%s: %w", s.opts.Socket, explainPeer(err))
			}
			return nil
		}
	}
}

// lookForErrors tells of the first ring that the back-end calls broken.
func (s *session) lookForErrors() {
	for i, p := range s.running {
		fds := []unix.PollFd{{Fd: int32(p.rx.fail), Events: unix.POLLIN}, {Fd: int32(p.tx.fail), Events: unix.POLLIN}}
		if n, err := unix.Poll(fds, 0); err == nil && n > 0 {
			s.failure.tell(fmt.Errorf("queue pair %d: %w", i, errCalledBroken))
			return
		}
	}
}

// finish stops the rings in order, as far as the back-end takes part. What is still in the tap is not sent.
func (s *session) finish() error {
	s.conn.Timeout = stopWithin
	var err error
	for _, p := range s.running {
		err = errors.Join(err, p.stop())
	}
	for i := 2*len(s.running) - 1; i >= 0 && err == nil; i-- {
		_, err = s.conn.GetVringBase(i)
	}
	if err != nil {
		return fmt.Errorf("%s: stop the rings: %w", s.opts.Socket, explainPeer(err))
	}
	return nil
}

// close ends the connection and gives back what it held. Frames that the back-end has not sent are counted.
func (s *session) close() error {
	var errs []error
	for _, p := range s.running {
		errs = append(errs, p.stop())
		p.abandon()
		errs = append(errs, p.close())
	}
	if err := s.conn.Close(); !errors.Is(err, net.ErrClosed) { // abortWith may have
		errs = append(errs, err)
	}
	if s.mem != nil {
		errs = append(errs, s.mem.Close())
	}
	return errors.Join(errs...)
}
