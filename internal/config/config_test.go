package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/vhostd/vhostd/internal/unixsock"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtionet"
	"github.com/vhostd/vhostd/worker"
)

func good() Guest {
	g := DefaultGuest()
	g.Name, g.Socket, g.Network = "vm1", "/run/vm1.sock", "null"
	return g
}

func TestGuestParse(t *testing.T) {
	g := good()
	g.MAC, g.MTU, g.Copy, g.TxLag, g.QueuePairs = "52:54:00:12:34:56", 9000, "never", 4, 128
	g.TxAlloc = "fragpool"
	g.SocketMode, g.SocketOwner = "660", "0:0"
	g.Experimental = []string{"gpa-addresses"}
	spec, err := g.Parse()
	if err != nil {
		t.Fatal(err)
	}
	if spec.MAC.String() != g.MAC || spec.MTU != 9000 || spec.Copy != virtionet.CopyNever || spec.TxAlloc != virtionet.TxFragPool || spec.Network.String() != "null" {
		t.Errorf("parsed wrongly: %+v", spec)
	}
	if spec.Protocol != vhostuser.ProtoGPAAddresses {
		t.Errorf("Protocol = %v", spec.Protocol)
	}
	if want := (unixsock.Options{Mode: 0o660}); spec.Listen != want {
		t.Errorf("Listen = %+v, want %+v", spec.Listen, want)
	}
}

func TestGuestErrors(t *testing.T) {
	for _, tc := range []struct {
		set       func(*Guest)
		key, text string
	}{
		{func(g *Guest) { g.Name = "" }, "name", "accepted are 1 to 64 letters"},
		{func(g *Guest) { g.Name = "a/b" }, "name", `"a/b"`},
		{func(g *Guest) { g.Name = strings.Repeat("a", 65) }, "name", "accepted are 1 to 64"},
		{func(g *Guest) { g.Socket = "" }, "socket", "empty"},
		{func(g *Guest) { g.Socket = "/" + strings.Repeat("a", 107) }, "socket", "at most 107"},
		{func(g *Guest) { g.Network = "" }, "network", "is missing: accepted are echo, null, sock, source, switch, tap, user"},
		{func(g *Guest) { g.Network = "xdp" }, "network", `"xdp" is not available in this build: accepted are echo, null, sock, source, switch, tap, user`},
		{func(g *Guest) { g.Network = "null,a=b" }, "network", "takes none"},
		{func(g *Guest) { g.QueuePairs = 0 }, "queue-pairs", "accepted are 1 to 128"},
		{func(g *Guest) { g.QueuePairs = 129 }, "queue-pairs", "129"},
		{func(g *Guest) { g.MAC = "52:54:00:12:34" }, "mac", "six hexadecimal bytes"},
		{func(g *Guest) { g.MAC = "53:54:00:12:34:56" }, "mac", "unicast"},
		{func(g *Guest) { g.MAC = "00:00:00:00:00:00" }, "mac", "unicast"},
		{func(g *Guest) { g.MTU = 67 }, "mtu", "68 to 65520"},
		{func(g *Guest) { g.MTU = 65521 }, "mtu", "68 to 65520"},
		{func(g *Guest) { g.Copy = "sometimes" }, "copy", "never"},
		{func(g *Guest) { g.TxAlloc = "slab" }, "tx-alloc", `"slab": accepted are frag, fragpool, refpage`},
		{func(g *Guest) { g.TxLag = -1 }, "tx-lag", "0 to 1024"},
		{func(g *Guest) { g.Experimental = []string{"gpa-addresses", "flight"} }, "experimental", `"flight": accepted are gpa-addresses`},
		{func(g *Guest) { g.SocketMode = "rw" }, "socket-mode", "octal"},
		{func(g *Guest) { g.SocketMode = "1777" }, "socket-mode", "octal"},
		{func(g *Guest) { g.SocketOwner = "nobody:" }, "socket-owner", "USER:GROUP"},
		{func(g *Guest) { g.SocketOwner = "no-such-user" }, "socket-owner", `no such user "no-such-user"`},
		{func(g *Guest) { g.SocketOwner = ":no-such-group" }, "socket-owner", "no such group"},
	} {
		g := good()
		tc.set(&g)
		_, err := g.Parse()
		checkKey(t, err, tc.key, tc.text)
	}
}

func checkKey(t *testing.T, err error, key, text string) {
	t.Helper()
	if e, ok := err.(*KeyError); !ok || e.Key != key || !strings.Contains(err.Error(), text) {
		t.Errorf("error = %v, want one about %s that contains %q", err, key, text)
	}
}

func TestChangeParse(t *testing.T) {
	text := func(s string) *string { return &s }
	spec, err := Change{TxAlloc: text("refpage"), Copy: text("always")}.Parse()
	if err != nil || *spec.TxAlloc != virtionet.TxRefPage || *spec.Copy != virtionet.CopyAlways {
		t.Errorf("%+v, %v", spec, err)
	}
	if spec, err = (Change{Copy: text("auto")}).Parse(); err != nil || spec.TxAlloc != nil || *spec.Copy != virtionet.CopyAuto {
		t.Errorf("%+v, %v", spec, err)
	}
	_, err = Change{TxAlloc: text("")}.Parse()
	checkKey(t, err, "tx-alloc", `"": accepted are frag`)
	_, err = Change{Copy: text("now")}.Parse()
	checkKey(t, err, "copy", "never")
	if _, err = (Change{}).Parse(); err == nil || !strings.Contains(err.Error(), "accepted are tx-alloc and copy") {
		t.Errorf("no change: %v", err)
	}
}

func TestProcessParse(t *testing.T) {
	p := DefaultProcess()
	p.Control, p.CPUs, p.Wake, p.Spin, p.ArenaSize = "/run/c", "0,2-3", "poll", "1ms", "1G"
	spec, err := p.Parse()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{0, 2, 3}, spec.CPUs); diff != "" {
		t.Error(diff)
	}
	if spec.Wake != worker.Poll || spec.Spin != time.Millisecond || spec.Arena.Bytes != 1<<30 {
		t.Errorf("parsed wrongly: %+v", spec)
	}
}

func TestArenaParse(t *testing.T) {
	zero := 0
	for _, tc := range []struct {
		huge, node string
		want       pagemem.Config
	}{
		{"off", "", pagemem.Config{}},
		{"try", "0", pagemem.Config{HugePages: pagemem.HugeTry, Node: &zero}},
		{"require,2M", "", pagemem.Config{HugePages: pagemem.HugeRequire}},
		{"require,1G", "0", pagemem.Config{HugePages: pagemem.HugeRequire, HugePageSize: 1 << 30, Node: &zero}},
	} {
		p := DefaultProcess()
		p.ArenaHugePages, p.ArenaNode = tc.huge, tc.node
		spec, err := p.Parse()
		tc.want.Bytes, tc.want.Name = 256<<20, "vhostd"
		if diff := cmp.Diff(tc.want, spec.Arena); err != nil || diff != "" {
			t.Errorf("%s on node %q: %v %s", tc.huge, tc.node, err, diff)
		}
	}
}

func TestProcessErrors(t *testing.T) {
	for _, tc := range []struct {
		set       func(*Process)
		key, text string
	}{
		{func(p *Process) { p.Control = "@x" }, "control", "abstract"},
		{func(p *Process) { p.ControlMode = "9" }, "control-mode", "octal"},
		{func(p *Process) { p.Wake = "never" }, "wake", "block"},
		{func(p *Process) { p.Spin = "50" }, "spin", "50us"},
		{func(p *Process) { p.Spin = "-1s" }, "spin", "0s to 10s"},
		{func(p *Process) { p.CPUs = "0,0" }, "cpus", "listed twice"},
		{func(p *Process) { p.CPUs = "3-1" }, "cpus", "ranges"},
		{func(p *Process) { p.CPUs = "1024" }, "cpus", "0 to 1023"},
		{func(p *Process) { p.CPUs = "a" }, "cpus", "ranges"},
		{func(p *Process) { p.ArenaSize = "1MiB" }, "arena-size", "16MiB to 64GiB"},
		{func(p *Process) { p.ArenaSize = "256MM" }, "arena-size", "16MiB to 64GiB"},
		{func(p *Process) { p.ArenaHugePages = "on" }, "arena-hugepages", `"on": accepted are off; try; require; try,2M`},
		{func(p *Process) { p.ArenaHugePages = "off,1G" }, "arena-hugepages", "require,1G"},
		{func(p *Process) { p.ArenaNode = "-1" }, "arena-node", "0 to 1023"},
		{func(p *Process) { p.ArenaNode = "1024" }, "arena-node", "0 to 1023"},
		{func(p *Process) { p.LogLevel = "loud" }, "log-level", "debug, info, warn and error"},
		{func(p *Process) { p.LogFormat = "xml" }, "log-format", "text and json"},
	} {
		p := DefaultProcess()
		tc.set(&p)
		_, err := p.Parse()
		checkKey(t, err, tc.key, tc.text)
	}
}

const sample = `# two guests
control: /run/vhostd/control.sock
wake: block
cpus: 2-3
spin: 20us
arena-hugepages: require,1G
arena-node: 0

guests:
  - name: vm1
    socket: /run/vhostd/vm1.sock
    network: tap,name=tap1,bridge=br0
    queue-pairs: 4
    socket-mode: 0660
    mac: 52:54:00:00:00:01
  - name: vm2
    socket: /run/vhostd/vm2.sock
    client: true
    network: echo
`

func TestParseFile(t *testing.T) {
	f, err := ParseFile("x.yaml", []byte(sample))
	if err != nil {
		t.Fatal(err)
	}
	want := &File{Process: DefaultProcess()}
	want.Control, want.Wake, want.CPUs, want.Spin = "/run/vhostd/control.sock", "block", "2-3", "20us"
	want.ArenaHugePages, want.ArenaNode = "require,1G", "0"
	vm1, vm2 := DefaultGuest(), DefaultGuest()
	vm1.Name, vm1.Socket, vm1.Network = "vm1", "/run/vhostd/vm1.sock", "tap,name=tap1,bridge=br0"
	vm1.QueuePairs, vm1.SocketMode, vm1.MAC = 4, "0660", "52:54:00:00:00:01"
	vm2.Name, vm2.Socket, vm2.Network, vm2.Client = "vm2", "/run/vhostd/vm2.sock", "echo", true
	want.Guests = []Guest{vm1, vm2}
	if diff := cmp.Diff(want, f); diff != "" {
		t.Error(diff)
	}
}

func TestParseFileErrors(t *testing.T) {
	guest := "guests:\n  - name: a\n    socket: /run/a\n    network: "
	for _, tc := range []struct{ name, text, want string }{
		{"unknown key", "guests: []\nwakee: block\n", "f:2:1: unknown field \"wakee\""},
		{"unknown key of a guest", guest + "null\n    mtuu: 9000\n", "f:5:5: unknown field \"mtuu\""},
		{"repeated key", "wake: block\nwake: poll\n", "f:2:1: "},
		{"wrong type", guest + "null\n    mtu: big\n", "f:5:10: wanted a whole number here"},
		{"list expected", "guests: 3\n", "f:1:9: "},
		{"tag before no list", "guests: !a x\n", "f: the file cannot be decoded: "},
		{"value of many lines", "control: a\n  " + strings.Repeat("b", 120) + "\n\n  c\n", "f:1:10: control: socket path a bbb"},
		{"mapping expected", "guests:\n  - 3\n", "f:2:5: "},
		{"text expected", "control: [a]\n", "f:1:10: "},
		{"bad value of a guest", guest + "null\n    mtu: 12\n", "f:5:10: mtu: 12: accepted are 68 to 65520"},
		{"bad network", guest + "xdp\n", "f:4:14: network: network \"xdp\" is not available"},
		{"missing key of a guest", "wake: block\nguests:\n  - name: a\n", "f:3:5: socket: socket path is empty"},
		{"bad value of the process", "\nwake: maybe\n", "f:2:7: wake: "},
		{"same name", guest + "null\n  - name: a\n    socket: /run/b\n    network: null\n", "f:5:11: name: \"a\" is the name of another guest"},
		{"same socket", guest + "null\n  - name: b\n    socket: /run/a\n    network: null\n", "f:6:13: socket: /run/a already belongs to guest a"},
		{"control's socket", "control: /run/a\n" + guest + "null\n", "f:4:13: socket: /run/a already belongs to the control socket"},
		{"one switch, two ageing times", guest + "switch,name=x,ageing=1m\n  - name: b\n    socket: /run/b\n    network: switch,name=x,ageing=2m\n",
			"f:7:14: network: network switch x: ageing=2m0s: another guest says 1m0s"},
		{"syntax", "guests: [\n", "f:1:"},
		{"tab", "guests:\n\t- name: a\n", "f:2:"},
		{"two documents", "wake: block\n---\nwake: poll\n", "f: the file holds more than one YAML document"},
		{"not a mapping", "just text\n", "f:1:1: "},
		{"too long", strings.Repeat("#", MaxFile+1), "f: the file is longer than"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := ParseFile("f", []byte(tc.text))
			if err == nil || !strings.HasPrefix(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error = %v, want one line that begins with %q", err, tc.want)
			}
		})
	}
}

func TestParseFileEmpty(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "guests:\n", "guests: []\n"} {
		f, err := ParseFile("f", []byte(text))
		if err != nil || len(f.Guests) != 0 || f.Process != DefaultProcess() {
			t.Errorf("%q: %+v, %v", text, f, err)
		}
	}
}

func TestReadFile(t *testing.T) {
	if _, err := ReadFile("/no/such/file"); err == nil || err.Error() != "/no/such/file: no such file or directory" {
		t.Errorf("absent file: %v", err)
	}
	if _, err := ReadFile(t.TempDir()); err == nil || !strings.Contains(err.Error(), "is a directory") {
		t.Errorf("directory: %v", err)
	}
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte(sample), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFile(path); err != nil {
		t.Error(err)
	}
}

// FuzzParseFile: whatever the file holds, the answer is a usable configuration or a one-line error.
func FuzzParseFile(f *testing.F) {
	for _, text := range []string{
		sample, "", "guests:\n  - name: a\n", "a: &x [*x]\n", "<<: {wake: block}\n", "guests: [{name: a, socket: /a, network: null}]",
		"? a\n: b\n", "--- |\n  x\n", "wake: !!binary aa\n", "guests:\n- &g {name: a, socket: /a, network: null}\n- *g\n", "{", "\t", "guests: {1: 2}", "%YAML 1.2\n---\n",
		"control: a\n  " + strings.Repeat("b", 120) + "\n   c",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		file, err := ParseFile("f", text)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("error of more than one line: %q", err)
			}
			return
		}
		if _, err := file.Process.Parse(); err != nil {
			t.Errorf("accepted, but %v", err)
		}
		for _, g := range file.Guests {
			if _, err := g.Parse(); err != nil {
				t.Errorf("accepted, but %v", err)
			}
		}
	})
}
