package packaging

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

// unpacked is the package's content in a folder, and the program in it.
func unpacked(t *testing.T) (root, program string) {
	t.Helper()
	root = t.TempDir()
	output(t, "dpkg-deb", "-x", artifact(t, "*_@.deb"), root)
	return root, filepath.Join(root, "usr/bin/vhostd")
}

// TestReproducible: the same source at another place, with another umask, time zone and file times, gives the same bytes.
func TestReproducible(t *testing.T) {
	first, err := os.ReadFile(filepath.Join(filepath.Dir(artifact(t, "*_@.deb")), "SHA256SUMS"))
	must(t, err)
	if n := strings.Count(string(first), "\n"); n != 2*len(archs()) {
		t.Errorf("SHA256SUMS names %d files:\n%s", n, first)
	}
	source, out := filepath.Join(t.TempDir(), "elsewhere"), t.TempDir()
	output(t, "sh", "-c", `umask 077 && mkdir "$1" && cd ../.. &&
		tar -c --exclude=./bin --exclude=./build . | tar -x --touch -C "$1"`, "copy", source)
	must(t, dist(source, out, "TZ=Pacific/Auckland", "LANG=de_DE.UTF-8", "GOAMD64=v3"))
	second, err := os.ReadFile(filepath.Join(out, "SHA256SUMS"))
	must(t, err)
	if string(first) != string(second) {
		t.Errorf("built here:\n%sand there:\n%s", first, second)
	}
	check := exec.Command("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS")
	check.Dir = out
	outputOf(t, check)
}

// TestPackageFiles: what is in the package, whose it is, and what it says about itself.
func TestPackageFiles(t *testing.T) {
	deb := artifact(t, "*_@.deb")
	list := output(t, "dpkg-deb", "-c", deb)
	for _, want := range []string{
		`-rwxr-xr-x root/root .* ./usr/bin/vhostd`,
		`-rw-r--r-- root/root .* ./etc/vhostd/vhostd.yaml`,
		`-rw-r--r-- root/root .* ./usr/lib/systemd/system/vhostd.service`,
		`-rw-r--r-- root/root .* ./usr/lib/systemd/system/vhostd@.service`,
		`-rw-r--r-- root/root .* ./usr/lib/systemd/system/vhostd@.socket`,
		`-rw-r--r-- root/root .* ./usr/lib/sysusers.d/vhostd.conf`,
		`-rw-r--r-- root/root .* ./usr/share/qemu/vhost-user/50-vhostd.json`,
		`-rw-r--r-- root/root .* ./usr/share/man/man8/vhostd-serve.8.gz`,
		`-rw-r--r-- root/root .* ./usr/share/bash-completion/completions/vhostd`,
		`-rw-r--r-- root/root .* ./usr/share/zsh/vendor-completions/_vhostd`,
		`-rw-r--r-- root/root .* ./usr/share/fish/vendor_completions.d/vhostd.fish`,
		`-rw-r--r-- root/root .* ./usr/share/doc/vhostd/copyright`,
		`-rw-r--r-- root/root .* ./usr/share/doc/vhostd/changelog.Debian.gz`,
		`-rw-r--r-- root/root .* ./usr/share/doc/vhostd/third-party-notices.gz`,
	} {
		if !regexp.MustCompile(`(?m)^` + want + `$`).MatchString(list) {
			t.Errorf("the package has no %s", want)
		}
	}
	for line := range strings.Lines(list) {
		if !regexp.MustCompile(`^(-rw-r--r--|-rwxr-xr-x|drwxr-xr-x) root/root `).MatchString(line) {
			t.Errorf("unusual owner or mode: %s", line)
		}
	}
	if got := output(t, "dpkg-deb", "-I", deb, "conffiles"); got != "/etc/vhostd/vhostd.yaml\n" {
		t.Errorf("conffiles %q", got)
	}
	root, program := unpacked(t)
	sums := exec.Command("md5sum", "--check", "--strict", "--quiet", "-")
	sums.Dir, sums.Stdin = root, strings.NewReader(output(t, "dpkg-deb", "-I", deb, "md5sums"))
	outputOf(t, sums)
	version := output(t, "dpkg-deb", "-f", deb, "Version")
	if got, want := output(t, program, "version"), "vhostd "+strings.TrimSuffix(version, "-1\n")+" "; !strings.HasPrefix(got, want) {
		t.Errorf("the package is %s, its program says %s", version, got)
	}
}

// TestArchive: the archive holds the same program, below one folder.
func TestArchive(t *testing.T) {
	path, dir := artifact(t, "vhostd-*-linux-@.tar.gz"), t.TempDir()
	name := strings.TrimSuffix(filepath.Base(path), ".tar.gz")
	for line := range strings.Lines(output(t, "tar", "-tf", path)) {
		if !strings.HasPrefix(line, name+"/") {
			t.Errorf("%s is not below %s", line, name)
		}
	}
	output(t, "tar", "-xf", path, "-C", dir)
	_, program := unpacked(t)
	output(t, "cmp", filepath.Join(dir, name, "vhostd"), program)
	for _, file := range []string{"LICENSE", "README.md", "CHANGELOG.md", "THIRD-PARTY-NOTICES", "docs/threat-model.md", "man/vhostd.8.gz",
		"completions/vhostd.bash", "systemd/vhostd@.service", "vhostd.yaml"} {
		if info, err := os.Stat(filepath.Join(dir, name, file)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", file, err)
		}
	}
	notices, err := os.ReadFile(filepath.Join(dir, name, "THIRD-PARTY-NOTICES"))
	must(t, err)
	for _, module := range []string{"Go standard library", "gvisor.dev/gvisor@", "github.com/spf13/cobra@", "github.com/miekg/dns@"} {
		if !strings.Contains(string(notices), "==== "+module) {
			t.Errorf("no license of %s", module)
		}
	}
}

// TestPackagedText: manual pages, completions, configuration and descriptor are what their readers take.
func TestPackagedText(t *testing.T) {
	needs(t, "man:man-db", "bash")
	root, program := unpacked(t)
	pages, err := filepath.Glob(filepath.Join(root, "usr/share/man/man8/*.8.gz"))
	must(t, err)
	if len(pages) < 5 {
		t.Errorf("%d manual pages", len(pages))
	}
	cmd := exec.Command("man", append([]string{"--warnings=w", "-E", "UTF-8", "-l"}, pages...)...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "MANPAGER=cat")
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Contains(string(out), "warning:") || !strings.Contains(string(out), "VHOSTD-SERVE(8)") {
		t.Errorf("man: %v\n%.2000s", err, out)
	}
	// What bash-completion does before a completion and after it.
	words := output(t, "bash", "-euc", `compopt() { :; }
		_init_completion() { words=("${COMP_WORDS[@]}"); cword=$COMP_CWORD; cur=${words[cword]}; prev=${words[cword-1]}; }
		PATH=$1/usr/bin:$PATH; source "$1/usr/share/bash-completion/completions/vhostd"
		COMP_WORDS=(vhostd serve --wake ''); COMP_CWORD=3; COMP_TYPE=9; COMP_LINE='vhostd serve --wake '; COMP_POINT=${#COMP_LINE}
		set +eu; "$(complete -p vhostd | sed 's/.*-F \([^ ]*\).*/\1/')"; printf '%s\n' "${COMPREPLY[@]}"`, "complete", root)
	if words != "block\nadaptive\npoll\n" {
		t.Errorf("bash completes --wake with %q", words)
	}
	if got := output(t, program, "config", "check", filepath.Join(root, "etc/vhostd/vhostd.yaml")); got != "ok\n" {
		t.Errorf("config check: %q", got)
	}
	var descriptor struct{ Binary, Type string }
	var capabilities struct{ Type string }
	text, err := os.ReadFile(filepath.Join(root, "usr/share/qemu/vhost-user/50-vhostd.json"))
	must(t, err)
	must(t, json.Unmarshal(text, &descriptor))
	must(t, json.Unmarshal([]byte(output(t, filepath.Join(root, descriptor.Binary), "--print-capabilities")), &capabilities))
	if descriptor.Type != "net" || descriptor.Type != capabilities.Type {
		t.Errorf("the descriptor says %+v, the program %+v", descriptor, capabilities)
	}
}

// TestPackagedLong has judges that are too much for every run: lintian, mandoc, the other shells, and the program of arm64.
func TestPackagedLong(t *testing.T) {
	testmain.Long(t)
	needs(t, "lintian", "mandoc", "zsh", "fish", "qemu-aarch64-static:qemu-user-static")
	for _, arch := range archs() {
		deb := artifact(t, "*_"+arch+".deb")
		if out, err := exec.Command("lintian", "--allow-root", "--fail-on", "error,warning", deb).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", filepath.Base(deb), err, out)
		}
	}
	root, _ := unpacked(t)
	output(t, "zsh", "-n", filepath.Join(root, "usr/share/zsh/vendor-completions/_vhostd"))
	output(t, "fish", "-n", filepath.Join(root, "usr/share/fish/vendor_completions.d/vhostd.fish"))
	pages, err := filepath.Glob(filepath.Join(root, "usr/share/man/man8/*.8.gz"))
	must(t, err)
	for _, page := range pages {
		output(t, "sh", "-c", `gzip -cd "$1" | mandoc -Tlint -Werror`, "lint", page)
	}
	other := t.TempDir()
	output(t, "dpkg-deb", "-x", artifact(t, "*_arm64.deb"), other)
	if got := output(t, "qemu-aarch64-static", filepath.Join(other, "usr/bin/vhostd"), "version"); !strings.HasSuffix(got, "linux/arm64\n") {
		t.Errorf("the program of arm64 says %q", got)
	}
}
