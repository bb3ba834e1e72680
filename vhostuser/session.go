package vhostuser

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
)

// MaxSessionRings is the largest number of rings in a session: SET_VRING_KICK,
// CALL and ERR carry the index in 8 bits.
const MaxSessionRings = 256

// Options of a session. The zero value means the defaults.
type Options struct {
	// Logger takes the session's records; nil discards them.
	Logger *slog.Logger
	// MessageTimeout bounds the time from the first to the last byte of a
	// message; there is no limit between messages. Default 10 s.
	MessageTimeout time.Duration
	// WriteTimeout bounds the time to send a reply. Default 10 s.
	WriteTimeout time.Duration
	// Rings keeps the positions of packed rings for sessions that end without telling
	// the front-end. Nil keeps none.
	Rings RingStore
	// Protocol are protocol features that are offered only when asked for:
	// ProtoGPAAddresses. Others do not count.
	Protocol ProtocolFeatures
	// StateTimeout bounds the transfer of device state, from its announcement to
	// the last byte. Default 10 s.
	StateTimeout time.Duration
	// Postcopy offers PAGEFAULT where it works. It does not in a program that does not call
	// [PostcopyHelper] first thing in main.
	Postcopy bool
}

func (o Options) withDefaults() Options {
	const timeout = 10 * time.Second
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.MessageTimeout <= 0 {
		o.MessageTimeout = timeout
	}
	if o.WriteTimeout <= 0 {
		o.WriteTimeout = timeout
	}
	if o.StateTimeout <= 0 {
		o.StateTimeout = timeout
	}
	return o
}

// Session is one connection of a front-end. Serve runs once, on one goroutine;
// State may be called from any.
type Session struct {
	conn      *net.UnixConn
	transport *transport
	dev       Device
	logger    *slog.Logger
	once      onceLogger
	opts      Options
	peer      string
	published atomic.Pointer[State]
	// mu guards what follows and the calls of dev: of Serve's goroutine, and in a
	// postcopy migration of another.
	mu      sync.Mutex
	failure atomic.Pointer[error] // why the connection was closed from here

	offered         virtio.Features
	acked           virtio.Features
	featuresSet     bool
	offeredProtocol ProtocolFeatures
	protocol        ProtocolFeatures
	status          uint8
	mtu             uint64 // as told, 0 for none
	rarps           rateLimit
	everRan         bool
	config          configView
	// afterReply, if set, is done once the reply to the present message was sent.
	afterReply func()

	mem      *guestmem.Table
	iotlb    *guestmem.IOTLB // nil without an IOMMU
	back     *backChannel
	post     *postcopy             // while memory arrives, or is about to
	advised  int                   // helpers started
	arrival  *guestmem.Arrival     // since then
	helpers  sync.WaitGroup        // goroutines of postcopy
	inflight *inflight             // nil without SET_INFLIGHT_FD
	removed  []guestmem.RegionSpec // by REM_MEM_REG; see forget
	rings    []*ring               // by index, nil until the front-end mentions the ring
	// enabledByDefault is set without VHOST_USER_F_PROTOCOL_FEATURES: then all
	// rings are enabled, also those mentioned later.
	enabledByDefault bool

	log        *guestmem.Log // in force while LOG_ALL is acknowledged
	logFD      fd
	logRefused bool // the last SET_LOG_BASE failed
	unlogged   bool // pages may have been written that no log was told of

	transfer     *transfer // of device state, until it was asked about
	abandoned    *transfer // the one before, unless it is known to have ended
	stateTimeout time.Duration
	closing      <-chan struct{}
}

// NewSession prepares a session on conn, which it owns from now on. The device
// must not be in use by another session.
func NewSession(conn *net.UnixConn, dev Device, opts Options) *Session {
	opts = opts.withDefaults()
	s := &Session{
		conn:      conn,
		transport: newTransport(conn, opts),
		dev:       dev,
		logger:    opts.Logger,
		once:      onceLogger{logger: opts.Logger},
		opts:      opts,
		peer:      peerName(conn),
		offered:   offeredFeatures(dev),
		config:    configView{dev: dev},
		back:      newBackChannel(opts.Logger),
		rings:     make([]*ring, RingLimit(dev.MaxRings())),

		stateTimeout: opts.StateTimeout,
	}
	s.config.setTell(s.back.configChanged)
	s.offeredProtocol = offeredProtocol(dev) | opts.Protocol&onRequest | s.offerPostcopy(opts)
	s.publish()
	return s
}

// Serve runs one connection from start to end; see [Session.Serve].
func Serve(ctx context.Context, conn *net.UnixConn, dev Device, opts Options) error {
	return NewSession(conn, dev, opts).Serve(ctx)
}

// Serve runs the session until the front-end closes the connection (nil), ctx is
// done (its cause) or the front-end breaks the protocol. On return the
// connection, every received descriptor and the memory table are closed and the
// device was told Disconnected.
func (s *Session) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, s.transport.interrupt)
	defer stop()
	s.closing = ctx.Done()

	s.dev.Connected(s.peer)
	defer s.release()
	for {
		if err := s.serveOne(); err != nil {
			return s.reason(ctx, err)
		}
	}
}

func (s *Session) serveOne() error {
	m, err := s.transport.read()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dispatch(m)
}

// reason turns what ended the session into Serve's result. A front-end may go
// away at any byte without this being a fault of anybody.
func (s *Session) reason(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case s.failure.Load() != nil:
		return fmt.Errorf("front-end %s: %w", s.peer, *s.failure.Load())
	case errors.Is(err, io.EOF):
		return nil
	case errors.Is(err, errCut), errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET):
		s.logger.Info("front-end went away", "peer", s.peer, "reason", err)
		return nil
	}
	return fmt.Errorf("front-end %s: %w", s.peer, err)
}

// release gives back everything in the order that the device relies on. The front-end learns of the end when no ring runs any
// more: QEMU then completes the guest's chains itself, and a ring that still ran would send what the guest has written anew.
func (s *Session) release() {
	s.back.close()
	s.abandonPostcopy()
	for _, r := range s.rings {
		if r != nil {
			s.stop(r)
		}
	}
	if s.mem != nil {
		if err := s.dev.SetMemory(nil, nil); err != nil {
			s.logger.Error("device keeps the guest's memory", "peer", s.peer, "err", err)
		}
	}
	s.conn.Close()
	s.dropTransfer()
	s.releaseLog()
	s.dev.Disconnected()
	s.dropInflight()
	s.closeTable(s.mem)
	s.mem = nil
	for _, r := range s.rings {
		if r != nil {
			r.closeFDs()
		}
	}
	s.publishPhase("closed")
	s.awaitTransfer()
}
