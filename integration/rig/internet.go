package rig

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
)

// Addresses of an Internet.
const (
	Live4, Live6 = "192.0.2.1", "2001:db8::1" // servers are there
	// Resolver is the one that resolv.conf names at first, OtherResolver another one.
	Resolver, OtherResolver = "192.0.2.53", "192.0.2.54"
	// Nothing answers there: packets vanish, or the host knows no way.
	Silent4, Silent6       = "100.64.0.99", "2001:db8:64::99"
	Unreached4, Unreached6 = "203.0.113.9", "2001:db8:dead::9"
	// Interface goes down and up by SetInterface; its addresses are there only while it is up.
	Interface              = "wan0"
	Interface4, Interface6 = "198.51.100.1", "2001:db8:51::1"
)

// nobody is the user that vhostd runs as here: one without any privileges.
const nobody = 65534

// Internet is a namespace that plays the host of a user network together with everything that the host reaches, so that nothing leaves the
// machine: addresses with servers and without, resolvers (see names.go), a resolv.conf of its own, and the right to send echo requests.
// vhostd runs in it as an ordinary user.
type Internet struct {
	*Namespace
	// Folder belongs to that user; sockets are made in it.
	Folder string
	binary string
	names  []*nameServer
	closes []func()
}

// NewInternet makes one. It needs root.
func NewInternet() (*Internet, error) {
	ns, err := NewNamespace()
	if err != nil {
		return nil, err
	}
	i := &Internet{Namespace: ns}
	for _, step := range []func() error{i.makeFolder, i.copyBinary, i.makeEtc, i.makeAddresses, i.startNames, i.startWeb} {
		if err := step(); err != nil {
			i.Close()
			return nil, err
		}
	}
	return i, nil
}

// Close ends the servers, the namespace and the folder. Daemons are to be stopped before.
func (i *Internet) Close() {
	for _, f := range i.closes {
		f()
	}
	for _, s := range i.names {
		s.close()
	}
	i.Namespace.Close()
	os.RemoveAll(i.Folder)
}

func (i *Internet) makeFolder() (err error) {
	// Not below a folder that only root may enter.
	if i.Folder, err = os.MkdirTemp("", "vhostd-internet"); err != nil {
		return err
	}
	return os.Chown(i.Folder, nobody, nobody)
}

// copyBinary puts vhostd where the user may run it.
func (i *Internet) copyBinary() error {
	binary, err := Binary()
	if err != nil {
		return err
	}
	content, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	i.binary = filepath.Join(i.Folder, "vhostd")
	return os.WriteFile(i.binary, content, 0o755)
}

// Binary is vhostd where the user may run it.
func (i *Internet) Binary() string { return i.binary }

// makeEtc gives the processes of the namespace an /etc of their own. The mount is seen by them alone and goes with them.
func (i *Internet) makeEtc() error {
	etc := filepath.Join(i.Folder, "etc")
	if err := os.Mkdir(etc, 0o755); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"passwd": "root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
		"group":  "root:x:0:\nnogroup:x:65534:\n",
		"hosts":  "127.0.0.1 localhost\n",
	} {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	if err := i.SetResolver(Resolver); err != nil {
		return err
	}
	return i.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("new mount namespace: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make the mounts private: %w", err)
		}
		return os.NewSyscallError("mount /etc", unix.Mount(etc, "/etc", "", unix.MS_BIND, ""))
	})
}

// SetResolver names the resolver in the namespace's resolv.conf, which is replaced as programs do that manage it.
func (i *Internet) SetResolver(address string) error {
	path := filepath.Join(i.Folder, "etc", "resolv.conf")
	if err := os.WriteFile(path+".new", []byte("nameserver "+address+"\n"), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (i *Internet) makeAddresses() error {
	return i.Do(func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte("0 2147483647"), 0); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		void, err := addTun("void") // packets vanish in it
		if err != nil {
			return err
		}
		wan, err := addTun(Interface)
		if err != nil {
			return err
		}
		for _, a := range []struct {
			link netlink.Link
			cidr string
		}{
			{lo, Live4 + "/32"}, {lo, Live6 + "/128"}, {lo, Resolver + "/32"}, {lo, OtherResolver + "/32"},
			{void, "100.64.0.1/24"}, {void, "2001:db8:64::1/64"}, {wan, Interface4 + "/24"}, {wan, Interface6 + "/64"},
		} {
			if err := addAddress(a.link, a.cidr); err != nil {
				return err
			}
		}
		return addUnreachable(lo, Unreached4+"/32", Unreached6+"/128")
	})
}

// addTun makes an interface that nobody reads from, and sets it up.
func addTun(name string) (netlink.Link, error) {
	tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name}, Mode: netlink.TUNTAP_MODE_TUN}
	if err := netlink.LinkAdd(tun); err != nil {
		return nil, fmt.Errorf("add %s: %w", name, err)
	}
	return tun, netlink.LinkSetUp(tun)
}

func addAddress(link netlink.Link, cidr string) error {
	address, err := netlink.ParseAddr(cidr)
	if err != nil {
		return fmt.Errorf("address %s: %w", cidr, err)
	}
	if address.IP.To4() == nil {
		address.Flags = unix.IFA_F_NODAD
	}
	if err := netlink.AddrReplace(link, address); err != nil {
		return fmt.Errorf("address %s: %w", cidr, err)
	}
	return nil
}

func addUnreachable(lo netlink.Link, cidrs ...string) error {
	for _, cidr := range cidrs {
		_, dst, err := net.ParseCIDR(cidr)
		if err != nil {
			return err
		}
		route := &netlink.Route{Dst: dst, Type: unix.RTN_UNREACHABLE}
		if dst.IP.To4() == nil {
			route.LinkIndex = lo.Attrs().Index
		}
		if err := netlink.RouteAdd(route); err != nil {
			return fmt.Errorf("route to %s: %w", cidr, err)
		}
	}
	return nil
}

// SetInterface sets Interface up with its addresses, or down without them: of one that goes down the kernel takes the IPv6 address away,
// and still answers for the IPv4 address, which a host that has lost its network does not have.
func (i *Internet) SetInterface(up bool) error {
	return i.Do(func() error {
		link, err := netlink.LinkByName(Interface)
		if err != nil {
			return err
		}
		if up {
			return errors.Join(netlink.LinkSetUp(link), addAddress(link, Interface4+"/24"), addAddress(link, Interface6+"/64"))
		}
		address, err := netlink.ParseAddr(Interface4 + "/24")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrDel(link, address), netlink.LinkSetDown(link))
	})
}

// startWeb serves guest.Web at the live addresses.
func (i *Internet) startWeb() error {
	for _, host := range []string{Live4, Live6} {
		listener, err := i.Listen(net.JoinHostPort(host, "80"))
		if err != nil {
			return err
		}
		i.closes = append(i.closes, func() { listener.Close() })
		go guest.ServeWeb(listener)
	}
	return nil
}

// StartDaemon runs `vhostd serve` as the user, with the network user and the given parameters, which start with a comma unless there
// are none. Started again it has the same sockets.
func (i *Internet) StartDaemon(params string, flags ...string) (*Daemon, error) {
	attr := syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	return startDaemon(i.Namespace, i.binary, i.Folder, "user"+params, flags, attr)
}
