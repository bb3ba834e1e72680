package user

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// backlogLen is how many connections wait in the host's kernel; it is cut to net.core.somaxconn.
const backlogLen = 4096

// Errors of [Port.Publish] and [Port.Unpublish] that callers tell apart; they are wrapped with what was asked for.
var (
	ErrPublished    = errors.New("it is published already")
	ErrNotPublished = errors.New("it is not published")
	// ErrTaken says that the host's port or path belongs to somebody else.
	ErrTaken = errors.New("it is taken")
	// ErrPublication says that the publication itself makes no sense here.
	ErrPublication = errors.New("it is not accepted")
)

// publications are the ports of the host that lead to guests.
type publications struct {
	port *Port

	mu     sync.Mutex
	list   []*publication
	closed bool
}

type publication struct {
	what      Publication
	listeners []listener
}

// listener is one socket of the host.
type listener interface{ close() }

func (s *publications) init(p *Port) { s.port = p }

// Publish opens a port of the host. The error says whose it is already, if it is taken. Nothing is open after an error.
func (p *Port) Publish(what Publication) error {
	s := &p.published
	if err := what.check(); err != nil {
		return fmt.Errorf("publish=%v: %w: %w", what, ErrPublication, err)
	}
	if g := what.Guest; g.IsValid() && !(g.Is4() && p.opts.isHost4(g) && !p.opts.NoIPv4 || g.Is6() && p.opts.Subnet6.Contains(g) && !p.opts.NoIPv6) || p.ours(g) {
		return fmt.Errorf("publish=%v: %w: %v is no address of a guest of this network", what, ErrPublication, g)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("publish=%v: the network is closed", what)
	}
	for _, other := range s.list {
		if what.clashes(&other.what) {
			return fmt.Errorf("publish=%v: %w (%v)", what, ErrPublished, other.what)
		}
	}
	entry := &publication{what: what}
	if err := p.listenAll(entry); err != nil {
		entry.close()
		return fmt.Errorf("publish=%v: %w", what, err)
	}
	s.list = append(s.list, entry)
	return nil
}

// Unpublish closes a port that was published in the same words. Connections that it has brought stay.
func (p *Port) Unpublish(what Publication) error {
	s := &p.published
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.list, func(e *publication) bool { return e.what.String() == what.String() })
	if i < 0 {
		return fmt.Errorf("publish=%v: %w", what, ErrNotPublished)
	}
	s.list[i].close()
	s.list = slices.Delete(s.list, i, i+1)
	return nil
}

// Published lists what is published, in the order in which it came.
func (p *Port) Published() []Publication {
	s := &p.published
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Publication, len(s.list))
	for i, e := range s.list {
		list[i] = e.what
	}
	return list
}

func (s *publications) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, e := range s.list {
		e.close()
	}
	s.list = nil
}

func (e *publication) close() {
	for _, l := range e.listeners {
		l.close()
	}
	e.listeners = nil
}

// clashes says whether two publications want the same port of the host.
func (p *Publication) clashes(other *Publication) bool {
	if p.Path != "" || other.Path != "" {
		return p.Path == other.Path
	}
	return p.Proto == other.Proto && int(p.Port) < int(other.Port)+other.count() && int(other.Port) < int(p.Port)+p.count() &&
		(!p.Addr.IsValid() || !other.Addr.IsValid() || p.Addr == other.Addr)
}

// listenAll makes the sockets.
func (p *Port) listenAll(e *publication) error {
	if e.what.Path != "" {
		l, err := p.listenUnix(e.what)
		if err == nil {
			e.listeners = append(e.listeners, l)
		}
		return err
	}
	addrs := []netip.Addr{e.what.Addr}
	if !e.what.Addr.IsValid() {
		addrs = []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
	}
	for i := range e.what.count() {
		one := e.what
		one.Port, one.GuestPort, one.Count = e.what.Port+uint16(i), e.what.GuestPort+uint16(i), 1
		for _, a := range addrs {
			l, err := p.listen(one, netip.AddrPortFrom(a, one.Port))
			if errors.Is(err, unix.EAFNOSUPPORT) && !e.what.Addr.IsValid() && a.Is6() {
				continue // a host without IPv6
			}
			if err != nil {
				return err
			}
			e.listeners = append(e.listeners, l)
		}
	}
	return nil
}

func (p *Port) listen(what Publication, at netip.AddrPort) (listener, error) {
	kind := unix.SOCK_STREAM
	if what.Proto == "udp" {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(familyOf(at.Addr()), kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a socket: %w", err)
	}
	if at.Addr().Is6() {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1) // bind fails if it is refused
	}
	if kind == unix.SOCK_STREAM {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) // connections of a process before may linger
	}
	if err := unix.Bind(fd, sockaddrOf(at)); err != nil {
		_ = unix.Close(fd)
		return nil, explainBind(err, at)
	}
	if kind == unix.SOCK_DGRAM {
		return p.watchUDP(fd, what)
	}
	return p.watchTCP(fd, what, "")
}

func explainBind(err error, at netip.AddrPort) error {
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("%w: port %d of %v belongs to another program (%w)", ErrTaken, at.Port(), at.Addr(), err)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("%v is no address of this host (%w)", at.Addr(), err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("port %d needs CAP_NET_BIND_SERVICE, which a sandboxed process has at its start only: "+
			"publish it then, or set the sysctl net.ipv4.ip_unprivileged_port_start to %d or less (%w)", at.Port(), at.Port(), err)
	}
	return fmt.Errorf("bind to %v: %w", at, err)
}

// listenUnix makes a socket of the file system, in the place of one that nobody listens on any more.
func (p *Port) listenUnix(what Publication) (listener, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a socket: %w", err)
	}
	at := &unix.SockaddrUnix{Name: what.Path}
	err = bindPrivate(fd, at)
	if errors.Is(err, unix.EADDRINUSE) && abandoned(what.Path) {
		if err = os.Remove(what.Path); err == nil {
			err = bindPrivate(fd, at)
		}
	}
	if err != nil {
		_ = unix.Close(fd)
		if errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("%w: %s is there already (%w)", ErrTaken, what.Path, err)
		}
		return nil, fmt.Errorf("make %s: %w", what.Path, err)
	}
	return p.watchTCP(fd, what, what.Path)
}

// bindPrivate makes a socket that only the process's user may connect to. The mask is the process's, so that another file made at the same
// moment would be private too.
func bindPrivate(fd int, at *unix.SockaddrUnix) error {
	old := unix.Umask(0o177)
	defer unix.Umask(old)
	return unix.Bind(fd, at)
}

// abandoned says whether the path is a socket that nobody listens on.
func abandoned(path string) bool {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return errors.Is(unix.Connect(fd, &unix.SockaddrUnix{Name: path}), unix.ECONNREFUSED)
}

// tcpListener accepts connections for a guest. It implements [source].
type tcpListener struct {
	port *Port
	what Publication
	path string // of a Unix socket

	mu     sync.Mutex
	fd     int
	token  token
	closed bool
}

func (p *Port) watchTCP(fd int, what Publication, path string) (listener, error) {
	l := &tcpListener{port: p, what: what, path: path, fd: fd}
	err := unix.Listen(fd, backlogLen)
	if err == nil {
		err = l.watch()
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *tcpListener) watch() (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.token, err = l.port.poller.add(l.fd, unix.EPOLLIN, l)
	}
	return err
}

// ready implements [source].
func (l *tcpListener) ready(uint32) {
	for range burst {
		fd, from, err := l.accept()
		switch {
		case err == nil:
			l.port.tcp.inbound(l.what, fd, addrPortOf(from))
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
			l.pause(err)
			return
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EBADF):
			return
		}
	}
}

func (l *tcpListener) accept() (int, unix.Sockaddr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return -1, nil, unix.EBADF
	}
	return unix.Accept4(l.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
}

// acceptPause is how long a listener rests when there are no descriptors.
const acceptPause = 100 * time.Millisecond

func (l *tcpListener) pause(err error) {
	l.port.log.Warn("user network: published port waits for descriptors", "publish", l.what.String(), "error", err)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.port.poller.remove(l.fd, l.token)
	l.token = token{}
	l.port.after(acceptPause, func() { _ = l.watch() }) // fails if the network is closed
}

func (l *tcpListener) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.closed = true
	l.port.poller.forget(l.token)
	_ = unix.Close(l.fd)
	if l.path != "" {
		_ = os.Remove(l.path)
	}
}

// target is the guest's address that a publication leads to for a client: of the client's protocol, if the guest has one.
func (p *Port) target(what Publication, client netip.Addr) (netip.Addr, bool) {
	if what.Guest.IsValid() {
		return what.Guest, true
	}
	if p.opts.NoIPv4 {
		return p.neighbors.newest(p.opts.Subnet6, nil)
	}
	if client.Is6() && !p.opts.NoIPv6 {
		if mac, ok := p.neighbors.lookup(p.opts.Guest); ok {
			if a, ok := p.neighbors.newest(p.opts.Subnet6, &mac); ok {
				return a, true
			}
		}
	}
	return p.opts.Guest, true
}

// keeps says whether the guest can be shown the client's own address: one that the guest sends answers for to us.
func (p *Port) keeps(client, guest netip.Addr) bool {
	return client.IsValid() && client.Is4() == guest.Is4() && !client.IsLoopback() && !client.IsLinkLocalUnicast() && !client.IsMulticast() &&
		!client.IsUnspecified() && !p.opts.Subnet.Contains(client) && !p.opts.Subnet6.Contains(client)
}
