package attach

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtio"
)

// Pauses between attempts to connect.
const (
	firstPause   = 100 * time.Millisecond
	longestPause = 2 * time.Second
)

// attachment is what outlives connections: the interface, its helper and the counters.
type attachment struct {
	opts Options
	ns   *namespace

	helper *exec.Cmd
	link   *link
	news   chan report // closed when the helper has ended

	taps     []int
	counts   []*traffic
	mtu      int
	features virtio.Features // of the first connection
	leased   string
	ready    bool
	sessions uint64
}

// Run attaches the namespace and returns when ctx is done, with nil, or when the attachment cannot go on. The interface is gone then.
// An *OptionError tells what is wrong with the options. The counters are valid in any case.
func Run(ctx context.Context, opts Options) (Counters, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return Counters{}, err
	}
	a := &attachment{opts: opts}
	if a.ns, err = openNamespace(opts.Netns); err != nil {
		return Counters{}, err
	}
	err = errors.Join(a.run(ctx), a.close())
	return a.counters(), err
}

func (a *attachment) run(ctx context.Context) error {
	pause, told := firstPause, ""
	for {
		start := time.Now()
		err := a.connection(ctx)
		if ctx.Err() != nil {
			return err
		}
		if !a.opts.Reconnect || fatal(err) {
			return err
		}
		// One line for each new trouble, not for every attempt.
		if text := err.Error(); text != told {
			a.opts.Logger.Warn("not attached, trying again", "reason", text)
			told = text
		}
		if time.Since(start) > longestPause {
			pause, told = firstPause, ""
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, longestPause)
	}
}

// localError is trouble on this side of the socket, which connecting again does not mend.
type localError struct{ error }

func (e localError) Unwrap() error { return e.error }

func fatal(err error) bool {
	var local localError
	return errors.As(err, &local) || errors.Is(err, errDeleted)
}

// connection is one life of the socket; a nil error says that ctx is done.
func (a *attachment) connection(ctx context.Context) error {
	s, err := dial(ctx, &a.opts)
	if err != nil {
		return unless(ctx, err)
	}
	if err = a.begin(ctx, s); err == nil && ctx.Err() == nil {
		a.sessions++
		a.carrier(true)
		err = a.serve(ctx, s)
		a.carrier(false)
	}
	return errors.Join(err, s.close())
}

// unless is err, or nil when ctx is done, which is its cause then.
func unless(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// begin makes rings run between the back-end and the interface, which it makes if there is none. When ctx is done it returns nil, and
// they may not run.
func (a *attachment) begin(ctx context.Context, s *session) error {
	if err := a.prepare(s); err != nil {
		return localError{err}
	}
	if s.features != a.features || s.pairs < len(a.taps) {
		return fmt.Errorf("%s: the back-end now has %d queue pairs and the features %v, the interface was made for %d and %v",
			a.opts.Socket, s.pairs, s.features, len(a.taps), a.features)
	}
	defer s.abortWith(ctx)()
	return unless(ctx, s.start(a.taps, a.mtu, a.counts))
}

// serve waits for the end of a connection that works.
func (a *attachment) serve(ctx context.Context, s *session) (err error) {
	serving, cancel := context.WithCancel(ctx)
	var failed error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		failed = s.wait(serving)
	}()
	defer func() {
		cancel()
		<-ended
	}()
	if a.opts.DHCP {
		if err := a.link.send(order{Lease: true}); err != nil {
			return localError{err}
		}
	} else {
		a.tellReady()
	}
	for {
		select {
		case r, ok := <-a.news:
			if err := a.report(r, ok); err != nil {
				return localError{err}
			}
		case <-ended:
			if failed != nil {
				return unless(ctx, failed) // both may be told to stop at once
			}
			// The interface goes in any case; a back-end that does not take part is left to itself.
			if err := s.finish(); err != nil {
				a.opts.Logger.Warn("the back-end does not stop in order", "reason", err)
			}
			return nil
		}
	}
}

// report takes what the helper says.
func (a *attachment) report(r report, ok bool) error {
	switch {
	case !ok:
		return errors.New("the helper in the namespace has ended")
	case r.Warning != "":
		a.opts.Logger.Warn(r.Warning)
	case r.Lease != "":
		if r.Lease != a.leased {
			a.opts.Logger.Info("address by DHCP", "address", r.Lease, "details", r.Detail)
		}
		a.leased = r.Lease
		a.tellReady()
	}
	return nil
}

func (a *attachment) tellReady() {
	if a.ready {
		a.opts.Logger.Info("attached again", "socket", a.opts.Socket)
		return
	}
	a.ready = true
	if a.opts.Ready != nil {
		a.opts.Ready(Attached{Interface: a.opts.Interface, Netns: a.opts.Netns, Socket: a.opts.Socket, Lease: a.leased})
	}
}

// prepare makes the interface for what the first connection has agreed on.
func (a *attachment) prepare(s *session) error {
	if a.taps != nil {
		return nil
	}
	if s.pairs < a.opts.QueuePairs {
		a.opts.Logger.Warn("the back-end offers fewer queue pairs", "wanted", a.opts.QueuePairs, "offered", s.pairs)
	}
	if err := a.startHelper(); err != nil {
		return err
	}
	if err := a.createInterface(a.interfaceFor(s)); err != nil {
		return err
	}
	a.features = s.features
	for range a.taps {
		a.counts = append(a.counts, &traffic{})
	}
	return nil
}

func (a *attachment) interfaceFor(s *session) interfaceConfig {
	c := interfaceConfig{Name: a.opts.Interface, Queues: s.pairs, HeaderLen: s.features.NetHdrLen(), Offloads: tapOffloads(s.features),
		MTU: a.opts.MTU, Stay: a.opts.DHCP}
	if c.MTU == 0 {
		c.MTU = s.mtu
	}
	if mac := a.opts.MAC; mac != nil {
		c.MAC = mac.String()
	} else if s.mac != nil {
		c.MAC = s.mac.String()
	}
	for _, address := range a.opts.Addresses {
		c.Addresses = append(c.Addresses, address.String())
	}
	for _, gateway := range a.opts.Gateways {
		c.Gateways = append(c.Gateways, gateway.String())
	}
	return c
}

// carrier tells the namespace whether there is anybody behind the interface. Kernels before 5.0 cannot.
func (a *attachment) carrier(on bool) {
	value := 0
	if on {
		value = 1
	}
	_ = unix.IoctlSetPointerInt(a.taps[0], unix.TUNSETCARRIER, value)
}

func (a *attachment) counters() (c Counters) {
	c.Connections = a.sessions
	for _, t := range append(a.counts, &traffic{}) {
		t.sent.addTo(&c.Sent)
		t.received.addTo(&c.Received)
	}
	return c
}

// close removes the interface and ends the helper.
func (a *attachment) close() error {
	closeAll(a.taps)
	errs := []error{a.ns.close()}
	if a.helper != nil {
		errs = append(errs, a.stopHelper())
	}
	return errors.Join(errs...)
}

// helperTimeout bounds the wait for the interface, and for the helper's end.
const helperTimeout = 10 * time.Second

func (a *attachment) startHelper() error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "helper's end")
	defer theirs.Close()
	ours := os.NewFile(uintptr(fds[0]), "helper")
	if a.helper, err = a.ns.spawn(theirs); err != nil {
		a.helper = nil
		return errors.Join(err, ours.Close())
	}
	a.link = &link{file: ours}
	return nil
}

func (a *attachment) createInterface(c interfaceConfig) error {
	if err := a.link.send(order{Create: &c}); err != nil {
		return err
	}
	if err := a.link.file.SetReadDeadline(time.Now().Add(helperTimeout)); err != nil {
		return err
	}
	var r report
	fds, err := a.link.receive(&r)
	switch {
	case err != nil:
		return fmt.Errorf("the helper in the namespace does not answer: %w", err)
	case r.Error != "":
		return errors.New(r.Error)
	case len(fds) != c.Queues:
		closeAll(fds)
		return fmt.Errorf("the helper in the namespace sent %d descriptors, %d are right", len(fds), c.Queues)
	case r.MTU < MinMTU || r.MTU > MaxMTU:
		closeAll(fds)
		return fmt.Errorf("interface %s has the MTU %d, accepted are %d to %d: somebody else has changed it", c.Name, r.MTU, MinMTU, MaxMTU)
	}
	a.taps, a.mtu = fds, r.MTU
	if err := a.link.file.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	if !c.Stay {
		return a.stopHelper()
	}
	a.news = make(chan report)
	go a.listen(a.news)
	return nil
}

// listen passes on what the helper says, until its end.
func (a *attachment) listen(news chan<- report) {
	defer close(news)
	for {
		var r report
		fds, err := a.link.receive(&r)
		closeAll(fds)
		if err != nil {
			return
		}
		news <- r
	}
}

// stopHelper ends the helper, which ends by itself when the socket is closed.
func (a *attachment) stopHelper() error {
	err := a.link.file.Close()
	if a.news != nil {
		for range a.news { // what it still says
		}
	}
	process := a.helper.Process
	late := time.AfterFunc(helperTimeout, func() { _ = process.Kill() })
	defer late.Stop()
	// Its exit status tells nothing that it has not said.
	_ = a.helper.Wait()
	a.helper = nil
	return err
}
