package rig

import (
	"encoding/binary"
	"fmt"
	"net"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// AddBridge makes a bridge with an address, up, that forwards at once.
func (ns *Namespace) AddBridge(name, cidr string) error {
	address, err := netlink.ParseAddr(cidr)
	if err != nil {
		return fmt.Errorf("address %q: %w", cidr, err)
	}
	return ns.Do(func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}
		if err := netlink.LinkAdd(bridge); err != nil {
			return fmt.Errorf("add bridge %s: %w", name, err)
		}
		if err := netlink.AddrReplace(bridge, address); err != nil {
			return fmt.Errorf("%s: address %s: %w", name, cidr, err)
		}
		return netlink.LinkSetUp(bridge)
	})
}

// Sniffer collects the frames of one EtherType that arrive at an interface.
type Sniffer struct {
	fd          int
	quit, ended chan struct{}

	mutex  sync.Mutex
	frames [][]byte
}

// Sniff begins to listen.
func (ns *Namespace) Sniff(name string, etherType uint16) (*Sniffer, error) {
	s := &Sniffer{quit: make(chan struct{}), ended: make(chan struct{})}
	err := ns.Do(func() error {
		link, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, etherType))
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol))
		if err != nil {
			return fmt.Errorf("packet socket: %w", err)
		}
		s.fd = fd
		// So that reading ends with Close.
		if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 20000}); err != nil {
			return fmt.Errorf("packet socket: %w", err)
		}
		return unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Index})
	})
	if err != nil {
		return nil, err
	}
	go s.read()
	return s, nil
}

func (s *Sniffer) read() {
	defer close(s.ended)
	buffer := make([]byte, 2048)
	for {
		select {
		case <-s.quit:
			return
		default:
		}
		if n, _, err := unix.Recvfrom(s.fd, buffer, 0); err == nil {
			s.mutex.Lock()
			s.frames = append(s.frames, append([]byte(nil), buffer[:n]...))
			s.mutex.Unlock()
		}
	}
}

// Frames returns what has come so far, link-layer header included.
func (s *Sniffer) Frames() [][]byte {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return append([][]byte(nil), s.frames...)
}

// Close ends the listening.
func (s *Sniffer) Close() {
	close(s.quit)
	<-s.ended
	unix.Close(s.fd)
}
