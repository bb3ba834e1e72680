// Command demo shows vhostd at work: it boots a Linux guest under QEMU whose network is vhostd's user network, and has it do what guests do:
// get addresses, resolve a name, fetch a page, be reached from outside, move data. `make demo` runs it. It needs root, for a network
// namespace that plays the Internet; vhostd itself runs as an ordinary user. Everything is removed again.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

const (
	guestPort = 22 // a service there greets and echoes
	published = rig.Live4 + ":2222"
	network   = ",search=example.test,publish=" + published + ":22"
	mebibyte  = 1 << 20
	patience  = time.Minute // for anything that the emulated guest does
)

func main() {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "demo: needs root, for a network namespace that plays the Internet")
		os.Exit(2)
	}
	start := time.Now()
	err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
	fmt.Printf("\nEverything is stopped and removed again, after %.0f s.\n", time.Since(start).Seconds())
}

// run goes through the demo with a folder for all that is temporary.
func run() error {
	folder, err := os.MkdirTemp("", "vhostd-demo")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	if err := os.Chmod(folder, 0o755); err != nil { // vhostd, which is somebody else, goes through it
		return err
	}
	if err := os.Setenv("TMPDIR", folder); err != nil {
		return err
	}
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM)
	d := &demo{folder: folder}
	ended := make(chan error, 1)
	go func() {
		err := d.show()
		d.remove()
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-interrupts:
		return errors.New("interrupted") // the children die with this process
	}
}

// demo is what has been started.
type demo struct {
	folder   string
	image    rig.Image
	internet *rig.Internet
	daemon   *rig.Daemon
	vm       *rig.VM
}

// show goes through the demo.
func (d *demo) show() error {
	for _, step := range []func() error{
		d.makeImage, d.makeInternet, d.startDaemon, d.boot, d.addresses, d.names, d.page, d.inbound, d.ping, d.throughput, d.counters, d.end,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// remove takes away what end has not ended.
func (d *demo) remove() {
	if d.vm != nil {
		d.vm.Close()
	}
	if d.daemon != nil {
		d.daemon.Kill()
	}
	if d.internet != nil {
		d.internet.Close()
	}
}

func (d *demo) makeImage() (err error) {
	fmt.Println("Packing a guest: Debian's kernel and a small init of our own.")
	d.image, err = rig.BuildImage(d.folder)
	return err
}

func (d *demo) makeInternet() (err error) {
	if d.internet, err = rig.NewInternet(); err != nil {
		return err
	}
	fmt.Printf("A network namespace plays the Internet: %s at %s and %s, a resolver at %s.\n", rig.WebName, rig.Live4, rig.Live6, rig.Resolver)
	return nil
}

func (d *demo) startDaemon() (err error) {
	if d.daemon, err = d.internet.StartDaemon(network); err != nil {
		return err
	}
	fmt.Printf("\n$ vhostd serve --socket %s --network user%s\n", d.daemon.Socket, network)
	fmt.Printf("It runs as an ordinary user (pid %d), without a tap and without any privileges.\n", d.daemon.PID())
	return nil
}

// boot starts QEMU and shows the time that passes until the guest answers.
func (d *demo) boot() (err error) {
	if d.vm, err = rig.StartVM(d.folder, d.image, rig.VMConfig{Socket: d.daemon.Socket}); err != nil {
		return err
	}
	fmt.Printf("QEMU runs (pid %d). The guest boots, emulated ", d.vm.PID())
	quit := make(chan struct{})
	go func() {
		for {
			select {
			case <-quit:
				return
			case <-time.After(time.Second):
				fmt.Print(".")
			}
		}
	}()
	event, err := d.vm.Boot()
	close(quit)
	if err == nil {
		fmt.Printf("\nLinux %s is up after %.1f s.\n\n", event.Kernel, event.Uptime)
	}
	return err
}

// call runs a command in the guest.
func (d *demo) call(command string, args, result any) error {
	return d.vm.Agent.Call(command, args, result, 2*patience)
}

// addresses has the guest ask for what it needs, over DHCP; its kernel makes an IPv6 address of what vhostd advertises.
func (d *demo) addresses() error {
	up := true
	link, err := d.vm.Link(guest.LinkArgs{Name: "eth0", Up: &up})
	if err != nil {
		return err
	}
	var lease guest.Lease
	if err := d.call(guest.CommandDHCP, guest.DHCPArgs{Name: "eth0", Timeout: patience}, &lease); err != nil {
		return err
	}
	fmt.Printf("eth0     %s: %s by DHCP, router %s, resolver %s\n", link.MAC, lease.CIDR, lease.Gateway, strings.Join(lease.DNS, " "))
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		var list guest.Addresses
		if err := d.call(guest.CommandAddress, guest.AddressArgs{Name: "eth0"}, &list); err != nil {
			return err
		}
		for _, a := range list {
			if !strings.HasPrefix(a.CIDR, "fe80:") && !a.Tentative {
				fmt.Printf("         %s by router advertisement\n", a.CIDR)
				return nil
			}
		}
	}
	return fmt.Errorf("the guest has no IPv6 address")
}

// names resolves a name in the guest.
func (d *demo) names() error {
	for _, kind := range []string{"A", "AAAA"} {
		var answer guest.ResolveResult
		args := guest.ResolveArgs{Server: "10.0.2.2:53", Name: rig.WebName, Type: kind, Timeout: patience}
		if err := d.call(guest.CommandResolve, args, &answer); err != nil {
			return err
		}
		if len(answer.Answers) != 1 {
			return fmt.Errorf("%s %s: %+v", rig.WebName, kind, answer)
		}
		fmt.Printf("DNS      %s %s is %s\n", rig.WebName, kind, answer.Answers[0])
	}
	return nil
}

// page fetches a page in the guest, by the name without its domain.
func (d *demo) page() error {
	host, _, _ := strings.Cut(rig.WebName, ".")
	var page guest.FetchResult
	if err := d.call(guest.CommandFetch, guest.FetchArgs{URL: "http://" + host + "/", Timeout: patience}, &page); err != nil {
		return err
	}
	if page.Text != guest.WebPage {
		return fmt.Errorf("page: %+v", page)
	}
	fmt.Printf("HTTP     http://%s/ says %q\n", host, strings.TrimSpace(page.Text))
	return nil
}

// inbound connects from the host to a port that leads to the guest.
func (d *demo) inbound() error {
	if err := d.call(guest.CommandListen, guest.ListenArgs{Port: guestPort}, nil); err != nil {
		return err
	}
	conn, err := d.internet.DialTCP(published, patience)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	line, err := guest.ReadLine(conn)
	if err != nil {
		return err
	}
	fmt.Printf("inbound  %s leads to port %d of the guest, which says %q\n", published, guestPort, line)
	return nil
}

// ping reaches a host that is there, and must not reach one that is not.
func (d *demo) ping() error {
	for _, host := range []struct {
		dst  string
		want int
	}{{rig.Live4, 5}, {rig.Silent4, 0}} {
		dst, want := host.dst, host.want
		var result guest.PingResult
		if err := d.call(guest.CommandPing, guest.PingArgs{Dst: dst, Size: 56, Count: 5, Timeout: time.Second}, &result); err != nil {
			return err
		}
		if result.Received != want {
			return fmt.Errorf("ping %s: %d of %d answers", dst, result.Received, result.Sent)
		}
		fmt.Printf("ping     %s: %d of %d answered", dst, result.Received, result.Sent)
		if want > 0 {
			fmt.Printf(", %v on average", result.MeanRTT.Round(time.Microsecond))
		}
		fmt.Println()
	}
	return nil
}

// throughput moves data both ways.
func (d *demo) throughput() error {
	ends := rig.Ends{NS: d.internet.Namespace, VM: d.vm, HostIP: rig.Live4}
	for _, toGuest := range []bool{false, true} {
		const bytes = 32 * mebibyte
		sent, received, err := ends.Stream(bytes, 1, toGuest, 2*patience)
		if err != nil {
			return err
		}
		if sent.SHA256 != received.SHA256 || received.Bytes != bytes {
			return fmt.Errorf("TCP: sent %+v, received %+v", sent, received)
		}
		direction := "from the guest"
		if toGuest {
			direction = "to the guest  "
		}
		fmt.Printf("TCP      %s: 32 MiB in %.1f s, %.0f Mbit/s, SHA-256 equal\n", direction, received.Took.Seconds(), guest.Rate(bytes, received.Took))
	}
	fmt.Println("         (the emulated processor, which makes and digests the bytes, is what limits these)")
	return nil
}

// counters prints what the command line shows of the daemon.
func (d *demo) counters() error {
	args := []string{"stats", "--control", d.daemon.Control}
	fmt.Printf("\n$ vhostd %s\n", strings.Join(args, " "))
	table, err := exec.Command(d.internet.Binary(), args...).CombinedOutput()
	fmt.Print(string(table))
	return err
}

// end stops both in order.
func (d *demo) end() error {
	if err := d.vm.Quit(); err != nil {
		return err
	}
	return d.daemon.Stop()
}
