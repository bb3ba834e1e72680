package rig

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace of its own, alive as long as the thread that runs Do's functions.
// The zero of *Namespace (nil) stands for the namespace of the test process.
type Namespace struct {
	work chan func()
	done chan struct{}
}

// NewNamespace makes an empty network namespace with its loopback up. It needs CAP_SYS_ADMIN.
func NewNamespace() (*Namespace, error) {
	ns := newThread()
	err := ns.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("new network namespace: %w", err)
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	if err != nil {
		ns.Close()
		return nil, err
	}
	return ns, nil
}

// Twin is the same namespace on another thread, so that functions that block do not hold up each other. It is closed like the first one.
func (ns *Namespace) Twin() (*Namespace, error) {
	var file *os.File
	if err := ns.Do(func() (err error) {
		file, err = os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
		return err
	}); err != nil {
		return nil, err
	}
	defer file.Close()
	twin := newThread()
	if err := twin.Do(func() error { return unix.Setns(int(file.Fd()), unix.CLONE_NEWNET) }); err != nil {
		twin.Close()
		return nil, fmt.Errorf("enter the network namespace: %w", err)
	}
	return twin, nil
}

// newThread starts the thread. It is never unlocked, so it ends with its goroutine, and with it its children (Pdeathsig).
func newThread() *Namespace {
	ns := &Namespace{work: make(chan func()), done: make(chan struct{})}
	go func() {
		runtime.LockOSThread()
		defer close(ns.done)
		for f := range ns.work {
			f()
		}
	}()
	return ns
}

// Do runs f on the namespace's thread: sockets and processes that f makes belong to the namespace. f must not block for long.
func (ns *Namespace) Do(f func() error) error {
	result := make(chan error, 1)
	ns.work <- func() { result <- f() }
	return <-result
}

// Close ends the thread; the namespace goes when its last process and socket have gone.
func (ns *Namespace) Close() {
	close(ns.work)
	<-ns.done
}

// Listen opens a TCP listener in the namespace; address is IP:PORT, with an IPv6 address in brackets.
func (ns *Namespace) Listen(address string) (listener net.Listener, err error) {
	err = ns.Do(func() error {
		listener, err = net.Listen("tcp", address)
		return err
	})
	return listener, err
}

// ListenPacket opens a UDP socket in the namespace.
func (ns *Namespace) ListenPacket(address string) (conn net.PacketConn, err error) {
	err = ns.Do(func() error {
		conn, err = net.ListenPacket("udp", address)
		return err
	})
	return conn, err
}

// DialUDP opens a connected UDP socket in the namespace.
func (ns *Namespace) DialUDP(address string) (conn net.Conn, err error) {
	err = ns.Do(func() error {
		conn, err = net.Dial("udp", address)
		return err
	})
	return conn, err
}

// DialTCP connects from within the namespace.
func (ns *Namespace) DialTCP(address string, timeout time.Duration) (conn *net.TCPConn, err error) {
	err = ns.Do(func() error {
		c, err := net.DialTimeout("tcp", address, timeout)
		if err == nil {
			conn = c.(*net.TCPConn)
		}
		return err
	})
	return conn, err
}

// ConfigureTap waits for the tap, gives it the address and MTU (0: as it is) and sets it up.
func (ns *Namespace) ConfigureTap(name, cidr string, mtu int, wait time.Duration) error {
	address, err := netlink.ParseAddr(cidr)
	if err != nil {
		return fmt.Errorf("address %q: %w", cidr, err)
	}
	link, err := ns.waitLink(name, wait)
	if err != nil {
		return err
	}
	return ns.Do(func() error {
		if mtu > 0 {
			if err := netlink.LinkSetMTU(link, mtu); err != nil {
				return fmt.Errorf("%s: MTU %d: %w", name, mtu, err)
			}
		}
		if err := netlink.AddrReplace(link, address); err != nil {
			return fmt.Errorf("%s: address %s: %w", name, cidr, err)
		}
		return netlink.LinkSetUp(link)
	})
}

func (ns *Namespace) waitLink(name string, wait time.Duration) (link netlink.Link, err error) {
	for end := time.Now().Add(wait); ; time.Sleep(20 * time.Millisecond) {
		err = ns.Do(func() error {
			link, err = netlink.LinkByName(name)
			return err
		})
		if err == nil || time.Now().After(end) {
			return link, err
		}
	}
}

// HasLink says whether an interface of that name exists.
func (ns *Namespace) HasLink(name string) bool {
	_, err := ns.waitLink(name, 0)
	return err == nil
}

// AddTap makes a persistent tap with a virtio header, to attach to.
func (ns *Namespace) AddTap(name string, multiQueue bool) error {
	flags := netlink.TUNTAP_NO_PI | netlink.TUNTAP_VNET_HDR
	tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name}, Mode: netlink.TUNTAP_MODE_TAP, Flags: flags}
	if multiQueue {
		tap.Flags |= netlink.TUNTAP_MULTI_QUEUE
		tap.Queues = 1
	}
	return ns.Do(func() error {
		if err := netlink.LinkAdd(tap); err != nil {
			return fmt.Errorf("add tap %s: %w", name, err)
		}
		for _, file := range tap.Fds {
			file.Close()
		}
		return nil
	})
}
