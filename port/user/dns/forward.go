package dns

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"
)

// restTime is how long a resolver that did not answer is asked last.
const restTime = 10 * time.Second

// maxDatagram bounds the answers that a guest may have in one datagram. What is longer is for TCP.
const maxDatagram = 4096

// Options are what a forwarder is made with, beside its [Config].
type Options struct {
	// Filter returns the policy for a guest by its address, nil if there is none. A nil Filter lets everybody look up everything.
	Filter func(guest netip.Addr) Filter
	// Logger receives changes of the resolvers' condition, at a bounded rate if its handler is that of internal/ratelog; nil means
	// slog.Default.
	Logger *slog.Logger
	// Fail is told of a panic on a goroutine of the forwarder, which is of no use any more. Nil lets the panic end the process.
	Fail func(cause any)
}

// Stats counts questions.
type Stats struct {
	Queries   uint64 `json:"queries"`
	Forwarded uint64 `json:"forwarded"` // answered by a resolver
	Local     uint64 `json:"local"`     // answered here
	Refused   uint64 `json:"refused"`   // by policy
	Failed    uint64 `json:"failed"`    // answered with SERVFAIL, because no resolver answered
	Busy      uint64 `json:"busy"`      // answered with SERVFAIL, because too many were under way
	Malformed uint64 `json:"malformed"` // dropped, or answered with FORMERR or NOTIMP
	Timeouts  uint64 `json:"timeouts"`  // of one resolver
	Truncated uint64 `json:"truncated"` // answers that did not fit the guest's datagram
	Streams   uint64 `json:"tcp"`       // questions to resolvers over TCP
	Stray     uint64 `json:"stray"`     // datagrams that answered nothing that was asked
}

type counters struct {
	queries, forwarded, local, refused, failed, busy, malformed, timeouts, truncated, streams, stray atomic.Uint64
}

// Forwarder answers guests. All methods are safe for concurrent use.
type Forwarder struct {
	opts     Options
	settings atomic.Pointer[settings]
	host     resolvConf
	sockets  sockets
	streams  chan struct{}
	count    counters
	load     load
	ctx      context.Context
	cancel   context.CancelFunc
	serving  serving

	mu      sync.Mutex
	resting map[netip.AddrPort]time.Time // until when resolvers are asked last
}

// New makes a forwarder, which Close ends.
func New(config Config, opts Options) (*Forwarder, error) {
	f := &Forwarder{opts: opts, streams: make(chan struct{}, MaxStreams), resting: map[netip.AddrPort]time.Time{}}
	if f.opts.Logger == nil {
		f.opts.Logger = slog.Default()
	}
	if err := f.Configure(config); err != nil {
		return nil, err
	}
	f.sockets.all = map[*socket]struct{}{}
	f.sockets.buffer.New = func() any { return new([maxAnswer]byte) }
	f.sockets.stray = func() { f.count.stray.Add(1) }
	f.sockets.contain = f.contain
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f, nil
}

// contain is deferred on every goroutine of the forwarder.
func (f *Forwarder) contain() {
	if f.opts.Fail == nil {
		return
	}
	if cause := recover(); cause != nil {
		f.opts.Fail(cause)
	}
}

// Configure makes the forwarder follow another configuration from the next question on. On an error nothing changes.
func (f *Forwarder) Configure(config Config) error {
	s, err := config.settle()
	if err != nil {
		return err
	}
	f.settings.Store(s)
	return nil
}

// Resolvers lists whom a name that belongs to no domain is asked at present.
func (f *Forwarder) Resolvers() []netip.AddrPort { return f.resolvers(f.settings.Load(), ".") }

// Stats returns the counters.
func (f *Forwarder) Stats() Stats {
	c := &f.count
	return Stats{
		Queries: c.queries.Load(), Forwarded: c.forwarded.Load(), Local: c.local.Load(), Refused: c.refused.Load(),
		Failed: c.failed.Load(), Busy: c.busy.Load(),
		Malformed: c.malformed.Load(), Timeouts: c.timeouts.Load(), Truncated: c.truncated.Load(), Streams: c.streams.Load(),
		Stray: c.stray.Load(),
	}
}

// Close stops serving, closes what it serves on, and returns when nothing is left.
func (f *Forwarder) Close() error {
	f.cancel()
	f.serving.close()
	f.sockets.close()
	return nil
}

// handle returns the answer to one message, nil if there is none. stream says that it came over TCP. It keeps no reference to query.
func (f *Forwarder) handle(ctx context.Context, guest netip.Addr, query []byte, stream bool) []byte {
	f.count.queries.Add(1)
	var m mdns.Msg
	if answer, ok := f.inspect(query, &m); !ok {
		f.count.malformed.Add(1)
		return answer
	}
	var filter Filter
	if f.opts.Filter != nil {
		filter = f.opts.Filter(guest)
	}
	s := f.settings.Load()
	size := maxAnswer
	if !stream {
		size = mdns.MinMsgSize
		if opt := m.IsEdns0(); opt != nil {
			size = min(max(size, int(opt.UDPSize())), maxDatagram)
		}
	}
	if filter != nil && !filter.Query(m.Question[0].Name) {
		f.count.refused.Add(1)
		return refusal(&m)
	}
	end := question(query)
	answer := s.local(&m, filter)
	if answer != nil {
		f.count.local.Add(1)
	} else if answer = f.forward(ctx, s, filter, query, end, stream); answer == nil {
		f.count.failed.Add(1)
		return failure(query, mdns.RcodeServerFailure)
	} else {
		f.count.forwarded.Add(1)
	}
	if len(answer) > size {
		f.count.truncated.Add(1)
	}
	return fit(answer, end, size)
}

// inspect parses a query. What is none gets the answer that inspect returns.
func (*Forwarder) inspect(query []byte, m *mdns.Msg) (answer []byte, ok bool) {
	switch {
	case len(query) < headerLen || query[2]&flagQR != 0:
		return nil, false
	case query[2]&opcodeMask != 0:
		return failure(query, mdns.RcodeNotImplemented), false
	case question(query) == 0 || m.Unpack(query) != nil || len(m.Question) != 1:
		return failure(query, mdns.RcodeFormatError), false
	case m.Question[0].Qtype == mdns.TypeAXFR || m.Question[0].Qtype == mdns.TypeIXFR:
		return failure(query, mdns.RcodeNotImplemented), false // an answer of many messages
	}
	return nil, true
}

// forward asks resolvers until one has an answer that settles the question, and returns the best answer for the guest, nil if there
// is none.
func (f *Forwarder) forward(ctx context.Context, s *settings, filter Filter, query []byte, end int, stream bool) (best []byte) {
	name, _, err := mdns.UnpackDomainName(query, headerLen)
	if err != nil {
		return nil
	}
	list := f.resolvers(s, mdns.CanonicalName(name))
	for try := range min(2*len(list), maxTries) {
		addr := list[try%len(list)]
		answer, err := f.ask(ctx, s, addr, query, end, stream)
		if errors.Is(err, errBusy) || ctx.Err() != nil {
			break
		}
		if err != nil {
			f.rest(addr, err)
			continue
		}
		f.wake(addr)
		best = restore(answer, query, end)
		if code := best[3] & rcodeMask; try >= len(list)-1 || code != mdns.RcodeServerFailure && code != mdns.RcodeRefused &&
			code != mdns.RcodeNotImplemented {
			break
		}
	}
	if best != nil && filter != nil {
		judged, ok := judge(filter, best)
		if !ok {
			return nil
		}
		best = judged
	}
	return best
}

// restore makes an answer fit the guest's question: its identifier, and its name to the letter.
func restore(answer, query []byte, end int) []byte {
	if len(answer) == headerLen {
		return failure(query, int(answer[3]&rcodeMask))
	}
	copy(answer[:2], query[:2])
	copy(answer[headerLen:end], query[headerLen:end])
	return answer
}

// ask asks one resolver once: by datagram, and over TCP if the answer does not fit one or the guest came that way.
func (f *Forwarder) ask(ctx context.Context, s *settings, addr netip.AddrPort, query []byte, end int, stream bool) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	query = bytes.Clone(query)
	if s.MixCase {
		mixCase(query, end)
	}
	if stream {
		half, cancel := context.WithTimeout(ctx, s.Timeout/2) // a resolver that drops connections may take datagrams
		defer cancel()
		if answer, err := f.askStream(half, addr, query, end, s.MixCase); err == nil {
			return answer, nil
		}
	}
	answer, err := f.sockets.ask(ctx, addr, query, end, s.MixCase)
	if err != nil || answer[2]&flagTC == 0 || stream {
		return answer, err
	}
	if whole, err := f.askStream(ctx, addr, query, end, s.MixCase); err == nil {
		return whole, nil
	}
	return answer, nil // truncated, as the resolver gave it
}

func (f *Forwarder) askStream(ctx context.Context, addr netip.AddrPort, query []byte, end int, exact bool) ([]byte, error) {
	select {
	case f.streams <- struct{}{}:
		defer func() { <-f.streams }()
	case <-ctx.Done():
		return nil, errBusy
	}
	f.count.streams.Add(1)
	return askStream(ctx, addr, query, end, exact)
}

// resolvers returns whom to ask, those that rest at the end.
func (f *Forwarder) resolvers(s *settings, name string) []netip.AddrPort {
	list := s.resolvers(name)
	now := time.Now()
	if list == nil {
		list = f.host.resolvers(s.ResolvConf, now)
	}
	list = slices.Clone(list)
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.resting) > 0 {
		slices.SortStableFunc(list, func(a, b netip.AddrPort) int {
			return rank(f.resting[a], now) - rank(f.resting[b], now)
		})
	}
	return list
}

func rank(until, now time.Time) int {
	if now.Before(until) {
		return 1
	}
	return 0
}

// rest has a resolver that failed asked last for a while.
func (f *Forwarder) rest(addr netip.AddrPort, err error) {
	f.count.timeouts.Add(1)
	f.mu.Lock()
	_, known := f.resting[addr]
	if len(f.resting) >= 2*MaxUpstreams && !known {
		clear(f.resting) // of resolvers that left the host's file
	}
	f.resting[addr] = time.Now().Add(restTime)
	f.mu.Unlock()
	if !known && f.ctx.Err() == nil {
		f.opts.Logger.Warn("a DNS resolver does not answer", "resolver", addr, "error", err)
	}
}

func (f *Forwarder) wake(addr netip.AddrPort) {
	f.mu.Lock()
	_, rested := f.resting[addr]
	delete(f.resting, addr)
	f.mu.Unlock()
	if rested {
		f.opts.Logger.Info("a DNS resolver answers again", "resolver", addr)
	}
}
