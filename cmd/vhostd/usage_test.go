package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestUsageErrors(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	file := filepath.Join(dir, "f.yaml")
	if err := os.WriteFile(file, []byte("guests:\n  - nam: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	none := filepath.Join(dir, "none.yaml")
	if err := os.WriteFile(none, []byte("guests: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	serve := []string{"serve", "--socket", socket, "--network", "null"}
	with := func(args ...string) []string { return append(append([]string{}, serve...), args...) }
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "give a command"},
		{[]string{"bogus"}, `unknown command "bogus"`},
		{[]string{"--bogus"}, "unknown flag: --bogus"},
		{[]string{"--socket-path", socket, "--fd", "3"}, "exclude each other"},
		{[]string{"--fd", "99"}, "--fd: file descriptor 99 is not open"},
		{[]string{"--fd", "x"}, "--fd: \"x\": accepted are whole numbers"},
		{[]string{"--fd", "0"}, "--fd: file descriptor 0 is not a socket"},
		{[]string{"--socket-path", ""}, "--socket: socket path is empty"},
		{[]string{"serve"}, "--socket is missing"},
		{[]string{"serve", "--network", "null"}, "--socket is missing"},
		{[]string{"serve", "--socket", socket, "--network", ""}, "--network: is missing: accepted are echo, null, sock, source, switch, tap, user"},
		{[]string{"serve", "--socket", socket, "--network", "user,publish=x"}, "network user: publish=x"},
		{[]string{"serve", "--socket", socket, "--network", "xdp"}, `"xdp" is not available in this build: accepted are`},
		{[]string{"serve", "--socket", socket, "--network", "echo,swap=maybe"}, "swap=maybe: accepted are on and off"},
		{[]string{"serve", "--socket", "/" + strings.Repeat("x", 107), "--network", "null"}, "at most 107"},
		{with("extra"), "extra"},
		{with("--mtu", "1"), "--mtu: 1: accepted are 68 to 65520"},
		{with("--mtu", "big"), "--mtu: \"big\": accepted are whole numbers"},
		{with("--client=maybe"), "--client: \"maybe\": accepted are true and false"},
		{with("--queue-pairs", "0"), "--queue-pairs: 0"},
		{with("--cpus", "x"), "--cpus"},
		{with("--wake", "soon"), "--wake"},
		{with("--copy", "some"), "--copy"},
		{with("--tx-alloc", "slab"), `--tx-alloc: "slab": accepted are frag, fragpool, refpage`},
		{with("--mac", "01:00:00:00:00:00"), "--mac"},
		{with("--experimental", "gpa-addresses,flight"), `--experimental: "flight": accepted are gpa-addresses`},
		{with("--socket-mode", "777777"), "--socket-mode"},
		{with("--socket-owner", "no-such-user"), "--socket-owner"},
		{with("--control", ""+strings.Repeat("y", 200)), "--control"},
		{with("--log-level", "all"), "--log-level"},
		{with("--arena-hugepages", "yes"), `--arena-hugepages: "yes": accepted are off; try; require`},
		{with("--arena-node", "any"), `--arena-node: "any": accepted are numbers of NUMA nodes, 0 to 1023`},
		{with("--sandbox", "yes"), `--sandbox: "yes": accepted are on and off`},
		{with("--socket-dirs", "run"), `--socket-dirs: "run": accepted are absolute paths`},
		{with("--config", file), "--socket describes one guest and --config names many"},
		{[]string{"serve", "--config", file}, file + ":2:5: unknown field \"nam\""},
		{[]string{"serve", "--config", none}, none + ": no guests, and no control socket"},
		{[]string{"serve", "--config", "/no/such"}, "/no/such: no such file"},
		{[]string{"config"}, "config check FILE"},
		{[]string{"config", "check"}, "give one file, not 0"},
		{[]string{"config", "check", file}, file + ":2:5: "},
		{[]string{"stats"}, "--control is missing"},
	} {
		code, stdout, stderr := run(t, tc.args...)
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) { wantError(t, exitUsage, tc.want, code, stdout, stderr) })
		absent(t, socket)
	}
}

func TestConfigCheck(t *testing.T) {
	code, stdout, stderr := run(t, "config", "check", "../../dist/vhostd.yaml")
	if code != 0 || stdout != "ok\n" || stderr != "" {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
}

// TestSampleDefaults: the defaults that the sample configuration shows are the real ones.
func TestSampleDefaults(t *testing.T) {
	text, err := os.ReadFile("../../dist/vhostd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	flags := newServe().Flags()
	for _, m := range regexp.MustCompile(`(?m)^\s*#([a-z-]+): (\S+)(.*)$`).FindAllStringSubmatch(string(text), -1) {
		f := flags.Lookup(m[1])
		if f == nil {
			t.Errorf("no flag --%s", m[1])
		} else if !strings.Contains(m[3], "no default") && f.DefValue != m[2] {
			t.Errorf("%s: the sample shows %s, the default is %s", m[1], m[2], f.DefValue)
		}
	}
}

func TestCapabilities(t *testing.T) {
	code, stdout, _ := run(t, "--print-capabilities")
	var got struct {
		Type     string   `json:"type"`
		Features []string `json:"features"`
	}
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != 0 || got.Type != "net" || got.Features == nil {
		t.Errorf("%d %q %v", code, stdout, err)
	}
}

func TestVersion(t *testing.T) {
	if code, stdout, _ := run(t, "version"); code != 0 || !regexp.MustCompile(`^vhostd \S+ go\S+ linux/\S+\n$`).MatchString(stdout) {
		t.Errorf("%d %q", code, stdout)
	}
	_, stdout, _ := run(t, "version", "--json")
	var v versionInfo
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || v.Version == "" || v.Go == "" {
		t.Errorf("%q %v", stdout, err)
	}
}

// TestHelpShowsDefaults: every flag of serve says its default.
func TestHelpShowsDefaults(t *testing.T) {
	_, stdout, _ := run(t, "serve", "--help")
	for line := range strings.SplitSeq(stdout, "\n") {
		flag := strings.TrimSpace(line)
		if !strings.HasPrefix(flag, "--") || regexp.MustCompile(`^--(socket|network|config) `).MatchString(flag) {
			continue
		}
		if !strings.Contains(line, "default") {
			t.Errorf("no default in %q", line)
		}
	}
}

func TestManAndCompletion(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man")
	if code, _, stderr := run(t, "man", dir); code != 0 {
		t.Fatalf("%d %s", code, stderr)
	}
	for _, page := range []string{"vhostd.8", "vhostd-serve.8", "vhostd-config-check.8", "vhostd-stats.8"} {
		text, err := os.ReadFile(filepath.Join(dir, page))
		if err != nil || !strings.Contains(string(text), ".SH") {
			t.Errorf("%s: %v", page, err)
		}
		if page == "vhostd-serve.8" && !strings.Contains(string(text), "\n  null     discards") {
			t.Errorf("the table of networks is no table in\n%s", text)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if code, stdout, _ := run(t, "completion", shell); code != 0 || !strings.Contains(stdout, "vhostd") {
			t.Errorf("completion %s: %d", shell, code)
		}
	}
	for flag, value := range map[string]string{"--wake": "adaptive\n", "--tx-alloc": "frag\nfragpool\nrefpage\n"} {
		if _, stdout, _ := run(t, "__complete", "serve", flag, ""); !strings.Contains(stdout, value) {
			t.Errorf("completion of %s: %q", flag, stdout)
		}
	}
}

// TestShippedFiles: what is shipped calls the program with flags that exist.
func TestShippedFiles(t *testing.T) {
	units, err := filepath.Glob("../../dist/systemd/*.service")
	if err != nil || len(units) != 2 {
		t.Fatalf("units: %v %v", units, err)
	}
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range strings.Fields(string(text)) {
			name, ok := strings.CutPrefix(word, "--")
			if ok && newServe().Flags().Lookup(strings.Split(name, "=")[0]) == nil {
				t.Errorf("%s: no flag %s", unit, word)
			}
		}
	}
	text, err := os.ReadFile("../../dist/vhost-user/50-vhostd.json")
	if err != nil {
		t.Fatal(err)
	}
	var descriptor struct{ Description, Type, Binary string }
	if err := json.Unmarshal(text, &descriptor); err != nil || descriptor.Type != "net" || descriptor.Binary != "/usr/bin/vhostd" {
		t.Errorf("%+v %v", descriptor, err)
	}
}

// TestUnitsVerify lets systemd judge the units with the program put where it was built.
func TestUnitsVerify(t *testing.T) {
	verifier, err := exec.LookPath("systemd-analyze")
	if err != nil {
		testmain.Skip(t, "needs systemd-analyze (Debian: apt-get install systemd)")
	}
	dir := t.TempDir()
	var units []string
	for from, to := range map[string]string{"vhostd.service": "vhostd.service", "vhostd@.service": "vhostd@vm1.service", "vhostd@.socket": "vhostd@vm1.socket"} {
		text, err := os.ReadFile("../../dist/systemd/" + from)
		if err != nil {
			t.Fatal(err)
		}
		text = regexp.MustCompile(`(?m)^Documentation=.*\n`).ReplaceAll(text, nil)
		units = append(units, filepath.Join(dir, to))
		if err := os.WriteFile(filepath.Join(dir, to), []byte(strings.ReplaceAll(string(text), "/usr/bin/vhostd", program)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(verifier, append([]string{"verify"}, units...)...).CombinedOutput(); err != nil || len(out) != 0 {
		t.Errorf("%v\n%s", err, out)
	}
}
