package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

const (
	emulated   = "guest"
	guestTrips = 2000
	guestEchos = 5000
	guestSlow  = 90 * time.Second // for anything that an emulated guest does
)

// machine is a guest under QEMU with its back end. The host's namespace is its own.
type machine struct {
	site
	name   string
	vm     *rig.VM
	target string // the host's address
}

// guests are the peers of the cell guest. A tap has addresses of its own, because nothing routes.
var guests = []struct {
	name  string
	start func(*machine, *settings) (rig.VMConfig, error)
}{
	{reference, func(m *machine, s *settings) (rig.VMConfig, error) { return m.serveVhostd(s.vhostd, s.flags) }},
	{"old", func(m *machine, s *settings) (rig.VMConfig, error) { return m.serveVhostd(s.baseline, s.oldFlags) }},
	{"passt", func(m *machine, _ *settings) (rig.VMConfig, error) {
		socket := filepath.Join(m.host.Folder, "passt.sock")
		if _, err := m.launch(m.host.Namespace, "passt", passtFlags("-s", socket)...); err != nil {
			return rig.VMConfig{}, err
		}
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if _, err := os.Stat(socket); err == nil {
				break
			}
		}
		return rig.VMConfig{Netdev: "stream,id=n0,server=off,addr.type=unix,addr.path=" + socket}, nil
	}},
	{"slirp", func(*machine, *settings) (rig.VMConfig, error) { return rig.VMConfig{Netdev: "user,id=n0"}, nil }},
	{"tap", func(m *machine, _ *settings) (rig.VMConfig, error) {
		m.target = tapHost
		if err := m.host.AddTap("tap0", false); err != nil {
			return rig.VMConfig{}, err
		}
		err := m.host.ConfigureTap("tap0", tapHost+"/24", mtu, patience)
		return rig.VMConfig{Netdev: "tap,id=n0,ifname=tap0,script=no,downscript=no"}, err
	}},
}

const tapHost, tapGuest = "10.0.9.1", "10.0.9.2/24"

func (m *machine) serveVhostd(binary string, flags []string) (rig.VMConfig, error) {
	socket := filepath.Join(m.host.Folder, "net.sock")
	_, err := m.serve(binary, socket, flags)
	return rig.VMConfig{Socket: socket}, err
}

// runGuests boots one guest for each peer and has them work in turns; those that wait are paused.
func runGuests(s *settings, r *report) error {
	folder, err := os.MkdirTemp("", "guests")
	if err != nil {
		return err
	}
	image, err := rig.BuildImage(folder)
	if err != nil {
		return err
	}
	var machines []*machine
	defer func() {
		for _, m := range machines {
			m.close()
		}
	}()
	for _, g := range guests {
		p := peer{name: g.name}
		if g.name == "passt" {
			p.program = g.name
		}
		if !slices.Contains(s.peers, g.name) || !p.present(s, r) {
			continue
		}
		m := &machine{name: g.name, target: rig.Live4}
		machines = append(machines, m)
		if err := m.boot(s, folder, image, g.start); err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
	}
	return rounds(s, len(machines), func(round, i int) error {
		m := machines[i]
		return m.work(s, func(what, unit string, value float64) { r.add(emulated, what, unit, m.name, round, value) }, r)
	})
}

func (m *machine) close() {
	if m.vm != nil {
		m.vm.Close()
	}
	m.site.close()
}

// boot returns when the guest has an address and is paused.
func (m *machine) boot(s *settings, folder string, image rig.Image, start func(*machine, *settings) (rig.VMConfig, error)) (err error) {
	if m.host, err = rig.NewInternet(); err != nil {
		return err
	}
	config, err := start(m, s)
	if err != nil {
		return err
	}
	config.Namespace = m.host.Namespace
	if m.vm, err = rig.StartVM(folder, image, config); err != nil {
		return err
	}
	if _, err := m.vm.Boot(); err != nil {
		return err
	}
	if m.target == tapHost {
		_, err = m.vm.SetUp(tapGuest)
	} else {
		up := true
		if _, err = m.vm.Link(guest.LinkArgs{Name: "eth0", Up: &up, MTU: mtu}); err == nil {
			err = m.vm.Agent.Call(guest.CommandDHCP, guest.DHCPArgs{Name: "eth0", Timeout: time.Minute}, nil, guestSlow)
		}
	}
	if err != nil {
		return err
	}
	return m.run(false)
}

// run has the guest go on, or pauses it.
func (m *machine) run(on bool) error {
	command := "stop"
	if on {
		command = "cont"
	}
	return m.vm.QMP.Execute(command, nil, nil, patience)
}

// tasks are QEMU's vCPU, all of QEMU, and what else frames pass through.
func (m *machine) tasks() ([]string, error) {
	var cpus []struct {
		Thread int `json:"thread-id"`
	}
	if err := m.vm.QMP.Execute("query-cpus-fast", nil, &cpus, patience); err != nil {
		return nil, err
	}
	pid := strconv.Itoa(m.vm.PID())
	return append([]string{fmt.Sprintf("%s/task/%d", pid, cpus[0].Thread), pid}, m.pids()...), nil
}

// cost is what a piece of work has used: the guest's processor, the rest of QEMU, and the back end, if that is not QEMU.
type cost struct{ vcpu, qemu, backend float64 }

func (m *machine) measured(work func() error) (c cost, err error) {
	tasks, err := m.tasks()
	if err != nil {
		return c, err
	}
	before, err := begin(tasks...)
	if err != nil {
		return c, err
	}
	if err := work(); err != nil {
		return c, err
	}
	spent, err := before.end()
	if err != nil {
		return c, err
	}
	return cost{spent[0], spent[1] - spent[0], sum(spent[2:])}, nil
}

// work is a guest's turn.
func (m *machine) work(s *settings, add func(what, unit string, value float64), r *report) (err error) {
	if err := m.run(true); err != nil {
		return err
	}
	for _, step := range []struct {
		name string
		run  func(*settings, func(what, unit string, value float64)) error
	}{
		{"stream", func(s *settings, add func(string, string, float64)) error { return m.stream(s, false, add) }},
		{"stream", func(s *settings, add func(string, string, float64)) error { return m.stream(s, true, add) }},
		{"trips", m.trips}, {"datagrams", m.datagrams}, {"connects", m.connects},
	} {
		if !s.wants(step.name) {
			continue
		}
		if err := step.run(s, add); err != nil {
			r.note("%s, guest, %s: %v", m.name, step.name, err)
		}
	}
	return m.run(false)
}

// stream moves zeros over one connection and takes the receiver's time.
func (m *machine) stream(s *settings, toGuest bool, add func(what, unit string, value float64)) error {
	bytes := s.mebibytes << 20
	ends := rig.Ends{NS: m.host.Namespace, VM: m.vm, HostIP: m.target}
	var sent, received guest.StreamResult
	c, err := m.measured(func() (err error) {
		sent, received, err = ends.Zeros(bytes, toGuest, guestSlow)
		return err
	})
	if err != nil {
		return err
	}
	if sent.Bytes != bytes || received.Bytes != bytes {
		return fmt.Errorf("%d bytes sent, %d received of %d", sent.Bytes, received.Bytes, bytes)
	}
	gb, way := float64(bytes)/1e9, direction(toGuest)
	add("TCP "+way, "Mbit/s", guest.Rate(bytes, received.Took))
	if len(m.procs) > 0 {
		add("back end's CPU "+way, "s/GB", c.backend/gb)
	}
	add("data path's CPU "+way, "s/GB", (c.backend+c.qemu)/gb)
	add("guest's CPU "+way, "s/GB", c.vcpu/gb)
	return nil
}

func (m *machine) trips(_ *settings, add func(what, unit string, value float64)) error {
	listener, err := m.host.Listen(net.JoinHostPort(m.target, "0"))
	if err != nil {
		return err
	}
	defer listener.Close()
	go guest.ServeStreams(listener, "hello")
	var result guest.TripsResult
	args := guest.TripsArgs{Addr: listener.Addr().String(), Count: guestTrips, Size: tripBytes, Timeout: guestSlow}
	if err := m.vm.Agent.Call(guest.CommandTrips, args, &result, guestSlow); err != nil {
		return err
	}
	add("TCP request/response p50", "us", float64(result.Median.Nanoseconds())/1e3)
	return nil
}

// datagrams go there and back, 32 on their way at a time.
func (m *machine) datagrams(_ *settings, add func(what, unit string, value float64)) error {
	ends := rig.Ends{NS: m.host.Namespace, VM: m.vm, HostIP: m.target}
	var result guest.EchoResult
	c, err := m.measured(func() (err error) {
		result, err = ends.Echo(guest.EchoArgs{Size: datagramBytes, Count: guestEchos, Window: 32, Timeout: patience})
		return err
	})
	if err != nil {
		return err
	}
	if result.Echoed == 0 {
		return fmt.Errorf("no datagram came back: %+v", result)
	}
	add("UDP 64 B, data path's CPU, mean of both ways", "us", (c.backend+c.qemu)*1e6/float64(2*result.Echoed))
	add("UDP 64 B, lost", "%", 100*(1-float64(result.Echoed)/float64(result.Sent)))
	return nil
}

func (m *machine) connects(_ *settings, add func(what, unit string, value float64)) error {
	listener, err := m.host.Listen(net.JoinHostPort(m.target, "0"))
	if err != nil {
		return err
	}
	defer listener.Close()
	go guest.ServeStreams(listener, "hello")
	const n = 200
	var result guest.ConnectResult
	args := guest.ConnectArgs{Addr: listener.Addr().String(), Count: n, Echo: true, Timeout: 30 * time.Second}
	if err := m.vm.Agent.Call(guest.CommandConnect, args, &result, guestSlow); err != nil {
		return err
	}
	add("200 connects at once", "ms", float64(result.Took.Microseconds())/1e3)
	add("200 connects at once, failed", "", float64(n-result.Outcomes[guest.Connected]))
	return nil
}
