package packaging

import (
	"os"
	"strings"
	"testing"
)

// settings are those of a unit file, as SECTION.KEY; of a key that comes again, the last one.
func settings(t *testing.T, path string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	all, section := map[string]string{}, ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if key, value, ok := strings.Cut(line, "="); ok && !strings.HasPrefix(line, "#") {
			all[section+"."+key] = value
		} else if strings.HasPrefix(line, "[") {
			section = strings.Trim(line, "[]")
		}
	}
	return all
}

// TestRestarts: a guest that ends the process again and again, with a defect of ours, does not end it for the others, as systemd's limit
// of five starts in ten seconds would. There is a pause before each start, and no start after a status that it would end with again.
func TestRestarts(t *testing.T) {
	for _, unit := range []string{"vhostd.service", "vhostd@.service"} {
		got := settings(t, "../../dist/systemd/"+unit)
		for key, want := range map[string]string{
			"Unit.StartLimitIntervalSec": "0", "Service.Restart": "on-failure", "Service.RestartSec": "1",
			"Service.RestartPreventExitStatus": "2",
		} {
			if got[key] != want {
				t.Errorf("%s: %s=%q, want %q", unit, key, got[key], want)
			}
		}
	}
}

// TestMaintainer: who builds packages for others says who answers for them, in the form that Debian reads.
func TestMaintainer(t *testing.T) {
	for _, text := range []string{"nobody", "Jo Doe", "Jo <jo>", "Jo/Doe <jo@example.org>", "Jo <jo@example.org>\nEssential: yes"} {
		err := dist("../..", t.TempDir(), "MAINTAINER="+text)
		if err == nil || !strings.Contains(err.Error(), "accepted is NAME <ADDRESS>") {
			t.Errorf("%q: %v", text, err)
		}
	}
	want := os.Getenv("MAINTAINER")
	if want == "" {
		want = "vhostd maintainers <vhostd@users.noreply.github.com>"
	}
	if got := output(t, "dpkg-deb", "-f", artifact(t, "*_@.deb"), "Maintainer"); got != want+"\n" {
		t.Errorf("Maintainer: %q, want %q", got, want)
	}
}
