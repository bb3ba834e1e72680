package packaging

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

const unitFolder = "/usr/lib/systemd/system/"

const daemonConfig = `arena-node: 0
guests:
  - {name: vm2, socket: /run/vhostd/vm2.sock, network: "tap,name=tap-vm2"}
  - {name: vm3, socket: /run/vhostd/vm3.sock, network: "user,host-loopback=on"}
  - {name: echo, socket: /run/vhostd/echo.sock, network: echo}
`

// TestInstalled takes the package through its life under systemd: installed, one service for one guest and one for many, crash,
// upgrade, removed, purged.
func TestInstalled(t *testing.T) {
	deb, err := os.ReadFile(artifact(t, "*_@.deb"))
	must(t, err)
	m := newMachine(t)
	m.boot()
	m.write("/vhostd.deb", string(deb))
	m.dpkg("--install", "/vhostd.deb")
	if groups := m.run("id", "-nG", "vhostd"); !strings.Contains(" "+strings.TrimSpace(groups)+" ", " kvm ") {
		t.Errorf("groups of the user: %q", groups)
	}
	if state, _ := m.try("systemctl", "is-enabled", "vhostd.service", "vhostd@vm1.socket"); state != "disabled\ndisabled\n" {
		t.Errorf("after the installation the units are %q", state)
	}
	if out := m.run("systemd-analyze", "verify", unitFolder+"vhostd.service", unitFolder+"vhostd@.service"); strings.Contains(out, "vhostd") {
		t.Errorf("systemd-analyze verify:\n%s", out)
	}
	for _, part := range []struct {
		name string
		run  func(*testing.T, *machine)
	}{{"instance", instance}, {"daemon", daemon}, {"upgrade", upgrade}, {"removal", removal}} {
		whole := m.t
		ok := t.Run(part.name, func(t *testing.T) {
			m.t = t
			part.run(t, m)
		})
		if m.t = whole; !ok {
			t.Fatalf("journal:\n%s", m.journal("vhostd*"))
		}
	}
}

// instance: a socket unit starts the service of one guest with its first front-end; a tap, packed rings in systemd's store, a crash.
func instance(t *testing.T, m *machine) {
	const unit = "vhostd@vm1.service"
	m.write("/etc/vhostd/vm1.env", "NETWORK=tap,name=tap-vm1\nOPTIONS=--queue-pairs=2 --mtu=1400\n")
	m.run("systemctl", "enable", "--now", "vhostd@vm1.socket")
	if got := m.run("stat", "--format=%A %U %G", "/run/vhostd/vm1.sock"); got != "srw-rw---- root kvm\n" {
		t.Errorf("socket: %s", got)
	}
	packed := frontend.Options{Features: virtio.FVersion1 | virtio.FRingPacked | virtio.FNetMrgRxBuf}
	g := m.connect("vm1", packed)
	g.send(bytes.Repeat([]byte{2}, 60))
	m.counted("tap-vm1")
	confined(t, m, unit)
	eventually(t, "systemd keeps the positions of the packed rings", func() bool { return m.property(unit, "NFileDescriptorStore") == "1" })

	before := m.property(unit, "MainPID")
	m.run("systemctl", "kill", "--signal=KILL", unit)
	g.close()
	eventually(t, "the service runs again", func() bool {
		return m.property(unit, "ActiveState") == "active" && m.property(unit, "MainPID") != before
	})
	if n := m.property(unit, "NFileDescriptorStore"); n != "1" {
		t.Errorf("after a crash systemd keeps %s descriptors", n)
	}
	g = m.connect("vm1", packed)
	defer g.close()
	g.send(bytes.Repeat([]byte{2}, 60))
	m.counted("tap-vm1")
}

// daemon: one service for all guests, with a tap, the user network and much traffic through an echo.
func daemon(t *testing.T, m *machine) {
	const unit = "vhostd.service"
	m.write("/etc/vhostd/vhostd.yaml", daemonConfig)
	m.run("systemctl", "enable", "--now", unit)
	m.run("vhostd", "stats", "--control", "/run/vhostd/control.sock")
	confined(t, m, unit)
	m.run("vhostd", "bench", "net-test", "--socket", "/run/vhostd/echo.sock", "--n", "20000", "--depth", "32")
	m.run("vhostd", "bench", "net-test", "--socket", "/run/vhostd/echo.sock", "--n", "20000", "--depth", "32", "--ring", "packed")

	tap := m.connect("vm2", frontend.Options{})
	tap.send(bytes.Repeat([]byte{2}, 60))
	m.counted("tap-vm2")
	tap.close()
	user := m.connect("vm3", frontend.Options{})
	host := m.listen()
	user.talk(host)
	user.close()
	must(t, host.Close())

	alive := m.property(unit, "WatchdogTimestampMonotonic")
	eventually(t, "the service tells the watchdog that it lives", func() bool {
		return m.property(unit, "WatchdogTimestampMonotonic") != alive
	})
	m.run("systemctl", "restart", unit)
	m.run("systemctl", "stop", unit)
	if state := m.property(unit, "Result"); state != "success" {
		t.Errorf("stopped with %s", state)
	}
	if !m.has("/run/vhostd/vm1.sock") || m.has("/run/vhostd/vm2.sock") || m.has("/run/vhostd/control.sock") {
		t.Errorf("left over: %s", m.run("ls", "/run/vhostd"))
	}
	m.run("systemctl", "start", unit)
}

// upgrade: what ran runs again, with the new program, and the changed configuration stays.
func upgrade(t *testing.T, m *machine) {
	units := []string{"vhostd.service", "vhostd@vm1.service"}
	before := map[string]string{}
	for _, unit := range units {
		before[unit] = m.property(unit, "MainPID")
	}
	m.dpkg("--install", "/vhostd.deb")
	for _, unit := range units {
		if state, pid := m.property(unit, "ActiveState"), m.property(unit, "MainPID"); state != "active" || pid == before[unit] {
			t.Errorf("%s is %s with pid %s, was %s", unit, state, pid, before[unit])
		}
	}
	if got := m.run("cat", "/etc/vhostd/vhostd.yaml"); got != daemonConfig {
		t.Errorf("the configuration became\n%s", got)
	}
}

func removal(t *testing.T, m *machine) {
	const link = "/etc/systemd/system/sockets.target.wants/vhostd@vm1.socket"
	if !m.has(link) {
		t.Errorf("no %s before the removal", link)
	}
	m.dpkg("--remove", "vhostd")
	if out, _ := m.try("pgrep", "-x", "vhostd"); out != "" {
		t.Errorf("after the removal processes still run: %s", out)
	}
	for _, path := range []string{"/usr/bin/vhostd", "/run/vhostd/vm1.sock", "/run/vhostd/vm2.sock"} {
		if m.has(path) {
			t.Errorf("the removal left %s", path)
		}
	}
	if !m.has("/etc/vhostd/vhostd.yaml") {
		t.Error("the removal took the configuration")
	}
	m.dpkg("--purge", "vhostd")
	if m.has("/etc/vhostd/vhostd.yaml") || m.has(link) || m.has("/etc/systemd/system/multi-user.target.wants/vhostd.service") {
		t.Error("the purge left the configuration or links")
	}
	if !m.has("/etc/vhostd/vm1.env") {
		t.Error("the purge took a file that is not the package's")
	}
}

// confined checks that the service has its rights and no others, and that the unit's own limits did not keep it from confining itself.
func confined(t *testing.T, m *machine, unit string) {
	t.Helper()
	status := m.run("cat", "/proc/"+m.property(unit, "MainPID")+"/status")
	for _, want := range []string{`Uid:\s+[1-9]\d*\s`, `CapEff:\s+0000000000001000`, `CapBnd:\s+0000000000001000`,
		`NoNewPrivs:\s+1`, `Seccomp:\s+2`} {
		if !regexp.MustCompile(`(?m)^` + want).MatchString(status) {
			t.Errorf("%s: no %s in\n%s", unit, want, status)
		}
	}
	journal := m.journal(unit)
	if !strings.Contains(journal, "msg=sandboxed") || strings.Contains(journal, "level=WARN") || strings.Contains(journal, "level=ERROR") {
		t.Errorf("%s: journal\n%s", unit, journal)
	}
}

// dpkg leaves out what other packages would do about the change, such as indexing all manual pages.
func (m *machine) dpkg(action, what string) {
	m.t.Helper()
	m.run("dpkg", "--no-triggers", action, what)
}

// counted waits for a frame that the guest sent through the tap.
func (m *machine) counted(tap string) {
	m.t.Helper()
	eventually(m.t, "a frame through "+tap, func() bool {
		return m.run("cat", "/sys/class/net/"+tap+"/statistics/rx_packets") != "0\n"
	})
}

// listen opens a UDP socket on the machine's loopback.
func (m *machine) listen() net.PacketConn {
	m.t.Helper()
	var conn net.PacketConn
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Never unlocked: the thread ends with the goroutine instead of going back with a foreign network.
		runtime.LockOSThread()
		var ns int
		if ns, err = unix.Open(m.path("/proc/1/ns/net"), unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return
		}
		defer unix.Close(ns)
		if err = unix.Setns(ns, unix.CLONE_NEWNET); err == nil {
			conn, err = net.ListenPacket("udp4", "127.0.0.1:0")
		}
	}()
	<-done
	must(m.t, err)
	return conn
}

// guest is a front-end with one queue pair.
type guest struct {
	m      *machine
	client *frontend.Client
	memory *frontend.Memory
	pair   *frontend.Pair
}

func (m *machine) connect(name string, o frontend.Options) *guest {
	m.t.Helper()
	memory, err := frontend.NewMemory(16 << 20)
	must(m.t, err)
	client, err := frontend.Connect(m.path("/run/vhostd/"+name+".sock"), memory, o)
	if err != nil {
		m.t.Fatalf("front-end of %s: %v\n%s", name, err, m.journal("vhostd*"))
	}
	pair, err := client.StartPair(0)
	must(m.t, err)
	return &guest{m: m, client: client, memory: memory, pair: pair}
}

func (g *guest) close() {
	g.m.t.Helper()
	_ = g.client.Close() // the daemon may have gone before
	must(g.m.t, g.memory.Close())
}

func (g *guest) send(frame []byte) {
	g.m.t.Helper()
	must(g.m.t, g.pair.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
	must(g.m.t, g.pair.DrainTx(patience))
}

// talk sends a datagram through the user network to the loopback of the machine.
func (g *guest) talk(host net.PacketConn) {
	t := g.m.t
	t.Helper()
	mac, broadcast := net.HardwareAddr{0x52, 0x54, 0, 0, 0, 3}, net.HardwareAddr{255, 255, 255, 255, 255, 255}
	self, gateway := net.IP{10, 0, 2, 15}, net.IP{10, 0, 2, 2}
	_, err := g.pair.PostRx(64)
	must(t, err)
	g.send(frameOf(t, &layers.Ethernet{SrcMAC: mac, DstMAC: broadcast, EthernetType: layers.EthernetTypeARP},
		&layers.ARP{AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4, HwAddressSize: 6, ProtAddressSize: 4,
			Operation: layers.ARPRequest, SourceHwAddress: mac, SourceProtAddress: self, DstHwAddress: make([]byte, 6), DstProtAddress: gateway}))
	var answer *layers.ARP
	for answer == nil || answer.Operation != layers.ARPReply {
		_, frame, err := g.pair.RecvFrame(patience)
		must(t, err)
		answer, _ = gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.Default).Layer(layers.LayerTypeARP).(*layers.ARP)
	}
	ip := &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolUDP, SrcIP: self, DstIP: gateway}
	udp := &layers.UDP{SrcPort: 4000, DstPort: layers.UDPPort(host.LocalAddr().(*net.UDPAddr).Port)}
	must(t, udp.SetNetworkLayerForChecksum(ip))
	g.send(frameOf(t, &layers.Ethernet{SrcMAC: mac, DstMAC: answer.SourceHwAddress, EthernetType: layers.EthernetTypeIPv4}, ip, udp,
		gopacket.Payload("through the user network")))
	must(t, host.SetReadDeadline(time.Now().Add(patience)))
	got := make([]byte, 100)
	n, _, err := host.ReadFrom(got)
	if err != nil || string(got[:n]) != "through the user network" {
		t.Errorf("the host received %q, %v\n%s", got[:n], err, g.m.journal("vhostd.service"))
	}
}

func frameOf(t *testing.T, parts ...gopacket.SerializableLayer) []byte {
	t.Helper()
	b := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(b, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, parts...); err != nil {
		t.Fatal(fmt.Errorf("frame: %w", err))
	}
	return b.Bytes()
}
