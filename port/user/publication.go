package user

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// maxRange bounds the ports of one publication: each has a socket.
const maxRange = 1024

// Publication is a port of the host, or several in a row, or a Unix socket, that leads to a guest.
type Publication struct {
	// Proto is "tcp" or "udp".
	Proto string
	// Addr is the host's address; invalid stands for all, of both protocols.
	Addr netip.Addr
	// Port is the host's port, and Count how many in a row there are; 0 means one.
	Port  uint16
	Count int
	// Path is a Unix stream socket that is made instead.
	Path string
	// Guest is the guest's address; invalid stands for the one of the options or, in a network without IPv4, the one heard of last.
	Guest netip.Addr
	// GuestPort is the guest's port, the first of as many as there are on the host.
	GuestPort uint16
}

const acceptPublish = "[ADDR:]PORT[-PORT]:[GUEST:]GUESTPORT[/tcp|/udp], with [ADDR6] and [GUEST6] in brackets, or unix:PATH:GUESTPORT"

// ParsePublication reads the form of the command line.
func ParsePublication(text string) (Publication, error) {
	p := Publication{Proto: "tcp"}
	fail := func(format string, args ...any) (Publication, error) {
		return Publication{}, fmt.Errorf("publish=%s: %s (accepted: %s)", text, fmt.Sprintf(format, args...), acceptPublish)
	}
	rest, proto, ok := strings.Cut(text, "/")
	isUnix := strings.HasPrefix(text, "unix:")
	if isUnix {
		rest, ok = strings.TrimPrefix(text, "unix:"), false
	}
	if ok {
		if proto != "tcp" && proto != "udp" {
			return fail("the protocol %q is not known", proto)
		}
		p.Proto = proto
	}
	rest, guestPort, ok := cutLast(rest)
	if !ok {
		return fail("one of the two ports is missing")
	}
	var err error
	if p.GuestPort, err = parsePort(guestPort); err != nil {
		return fail("the guest's port is %v", err)
	}
	if isUnix {
		if p.Path = rest; rest == "" {
			return fail("the path is empty")
		}
		return p, p.check()
	}
	if before, guest, ok := cutLast(rest); ok && !isPort(guest) {
		if p.Guest, err = parseHost(guest); err != nil {
			return fail("the guest is %v", err)
		}
		rest = before
	}
	host, ports, ok := cutLast(rest)
	if !ok {
		ports = rest
	} else if p.Addr, err = parseHost(host); err != nil {
		return fail("the host's address is %v", err)
	}
	first, last, isRange := strings.Cut(ports, "-")
	if p.Port, err = parsePort(first); err != nil {
		return fail("the host's port is %v", err)
	}
	p.Count = 1
	if isRange {
		end, err := parsePort(last)
		if err != nil || end < p.Port {
			return fail("the range of ports %q has no end behind its start", ports)
		}
		p.Count = int(end-p.Port) + 1
	}
	if err := p.check(); err != nil {
		return fail("%v", err)
	}
	return p, nil
}

// check judges what the fields say together.
func (p *Publication) check() error {
	switch {
	case p.Proto != "tcp" && p.Proto != "udp":
		return fmt.Errorf("protocol %q: accepted are tcp and udp", p.Proto)
	case strings.HasPrefix(p.Path, "@"), strings.ContainsRune(p.Path, 0):
		return fmt.Errorf("unix:%s: abstract sockets have no permissions and are not accepted; give a path", p.Path)
	case p.Path != "" && p.Proto != "tcp":
		return fmt.Errorf("a Unix socket carries tcp, not %s", p.Proto)
	case p.GuestPort == 0, p.Path == "" && p.Port == 0:
		return fmt.Errorf("ports are 1 to 65535")
	case p.Count < 0 || p.Count > maxRange:
		return fmt.Errorf("%d ports in a row: at most %d are accepted", p.Count, maxRange)
	case int(p.GuestPort)+p.count() > 1<<16, int(p.Port)+p.count() > 1<<16:
		return fmt.Errorf("the range goes beyond port 65535")
	}
	return nil
}

func (p *Publication) count() int { return max(p.Count, 1) }

// String is the form of the command line.
func (p Publication) String() string {
	if p.Path != "" {
		return fmt.Sprintf("unix:%s:%d", p.Path, p.GuestPort)
	}
	text := ""
	if p.Addr.IsValid() {
		text = hostText(p.Addr) + ":"
	}
	text += strconv.Itoa(int(p.Port))
	if n := p.count(); n > 1 {
		text += "-" + strconv.Itoa(int(p.Port)+n-1)
	}
	if p.Guest.IsValid() {
		text += ":" + hostText(p.Guest)
	}
	text += ":" + strconv.Itoa(int(p.GuestPort))
	if p.Proto == "udp" {
		text += "/udp"
	}
	return text
}

// host is the host's side, for people.
func (p *Publication) host() string {
	if p.Path != "" {
		return p.Path
	}
	addr := "*"
	if p.Addr.IsValid() {
		addr = hostText(p.Addr)
	}
	text := addr + ":" + strconv.Itoa(int(p.Port))
	if n := p.count(); n > 1 {
		text += "-" + strconv.Itoa(int(p.Port)+n-1)
	}
	return text
}

// guest is the guest's side, for people; without says where a publication leads to that names nobody.
func (p *Publication) guest(without string) string {
	addr := without
	if p.Guest.IsValid() {
		addr = hostText(p.Guest)
	}
	return addr + ":" + strconv.Itoa(int(p.GuestPort))
}

func hostText(a netip.Addr) string {
	if a.Is6() {
		return "[" + a.String() + "]"
	}
	return a.String()
}

// cutLast cuts around the last colon outside of brackets.
func cutLast(s string) (before, after string, ok bool) {
	inside := false
	for i := len(s) - 1; i >= 0; i-- {
		switch {
		case s[i] == ']':
			inside = true
		case s[i] == '[':
			inside = false
		case s[i] == ':' && !inside:
			return s[:i], s[i+1:], true
		}
	}
	return s, "", false
}

func isPort(s string) bool {
	_, err := parsePort(strings.SplitN(s, "-", 2)[0])
	return err == nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || s[0] == '+' {
		return 0, fmt.Errorf("%q, wanted 1 to 65535", s)
	}
	return uint16(n), nil
}

func parseHost(s string) (netip.Addr, error) {
	inner, bracket := strings.CutPrefix(s, "[")
	inner, closed := strings.CutSuffix(inner, "]")
	a, err := netip.ParseAddr(inner)
	if err != nil || bracket != closed || bracket != a.Is6() || a.Is4In6() || a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q, wanted an IPv4 address, or an IPv6 address in brackets", s)
	}
	return a, nil
}
