package sandbox

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
)

func init() {
	roles["needs"], roles["resolver"], roles["outside"], roles["cost"] = needs, resolver, outside, cost
}

// needs does what only some options allow.
func needs(o Options) {
	enter(o)
	tun, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	say("tun", err)
	request, err := unix.NewIfreq("sandbox%d")
	if err == nil {
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(tun, unix.TUNSETIFF, request)
	}
	say("tap", err)
	_, err = unix.IoctlGetTermios(tun, unix.TCGETS)
	say("other-ioctl", err)
	_, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	say("netlink", err)
	_, err = os.ReadFile("/etc/passwd")
	say("passwd", err)
	_, err = os.ReadFile("/etc/shadow")
	say("shadow", err)
	file := filepath.Join(o.StateDir, "file")
	err = os.WriteFile(file, []byte("x"), 0o600)
	if err == nil {
		_, err = os.ReadFile(file)
	}
	say("state-write", err)
	say("state-remove", os.Remove(file))
	say("state-elsewhere", os.WriteFile(filepath.Join(o.StateDir, "..", "file"), nil, 0o600))
}

// TestNeeds: each option opens what it names and nothing else.
func TestNeeds(t *testing.T) {
	needRoot(t)
	needLandlock(t)
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		testmain.Skip(t, "%v", err)
	}
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		o       Options
		allowed []string
	}{
		{Options{}, nil},
		{Options{Taps: true, Keep: []int{unix.CAP_NET_ADMIN}}, []string{"tun", "tap", "netlink"}},
		{Options{Taps: true}, []string{"tun", "netlink"}}, // the interface needs the capability
		{Options{Names: true}, []string{"passwd"}},
		{Options{StateDir: dir}, []string{"state-write", "state-remove"}},
	} {
		got := play(t, "needs", c.o, nil)
		for _, name := range []string{"tun", "tap", "netlink", "passwd", "shadow", "other-ioctl", "state-write", "state-remove", "state-elsewhere"} {
			if (got[name] == "ok") != slices.Contains(c.allowed, name) || got[name] == "" {
				t.Errorf("%+v: %s: %q", c.o, name, got[name])
			}
		}
	}
}

// resolver reads a file again when it is told to.
func resolver(o Options) {
	resolvConf = filepath.Join(o.StateDir, "etc", "resolv.conf")
	file := resolvConf
	o.StateDir = ""
	enter(o)
	for range 4 {
		text, err := os.ReadFile(file)
		fmt.Printf("read %q %v\n", text, err)
		if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
			return
		}
	}
}

// TestResolver: resolv.conf is read through its links, also after a link, its target or the file itself was replaced.
func TestResolver(t *testing.T) {
	needLandlock(t)
	base := t.TempDir()
	put := func(path, text string) { // as editors and managers do
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(base, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(base, path)
		if err := os.WriteFile(file+".new", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	put("run/b/stub", "first")
	put("run/a/x", "")
	put("etc/x", "")
	for link, target := range map[string]string{"etc/resolv.conf": "../run/a/link", "run/a/link": filepath.Join(base, "run/b/stub")} {
		if err := os.Symlink(target, filepath.Join(base, link)); err != nil {
			t.Fatal(err)
		}
	}
	r := startRole(t, "resolver", Options{StateDir: base, Resolver: true}, nil)
	next := func(want string) {
		t.Helper()
		for r.out.Scan() {
			var text string
			if n, _ := fmt.Sscanf(r.out.Text(), "read %q", &text); n == 1 {
				if text != want {
					t.Errorf("%s, want %q", r.out.Text(), want)
				}
				return
			}
		}
		t.Fatalf("ended before %q was read", want)
	}
	next("first")
	for _, step := range []struct{ path, text string }{{"run/b/stub", "second"}, {"run/a/link", "third"}, {"etc/resolv.conf", "fourth"}} {
		put(step.path, step.text)
		if _, err := r.stdin.Write([]byte{'\n'}); err != nil {
			t.Fatal(err)
		}
		next(step.text)
	}
}

// outside enters a sandbox inside of another one, whose filter refuses some calls with EPERM.
func outside(o Options) {
	refused := []uint32{unix.SYS_ADD_KEY}
	if o.StateDir == "strict" {
		refused = []uint32{unix.SYS_LANDLOCK_CREATE_RULESET, unix.SYS_SECCOMP}
	}
	o.StateDir = ""
	p := []unix.SockFilter{load(offsetNumber)}
	for _, n := range refused {
		p = append(p, jump(unix.BPF_JEQ, n, 0, 1), ret(unix.SECCOMP_RET_ERRNO|uint32(unix.EPERM)))
	}
	runtime.LockOSThread()
	say("prctl", unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	say("outer", loadFilter(append(p, ret(unix.SECCOMP_RET_ALLOW)), unix.SECCOMP_FILTER_FLAG_TSYNC))
	enter(o)
	say("mount", unix.Mount("none", "/mnt", "nonsense", 0, ""))
}

// TestOutside: within a container that has a filter ours comes on top; where the container does not allow it, the state says so.
func TestOutside(t *testing.T) {
	want(t, play(t, "outside", Options{}, nil), map[string]string{"outer": "ok", "enter": "ok", "mount": refusedCall, "state": `"seccomp":true`})
	got := play(t, "outside", Options{StateDir: "strict"}, nil)
	want(t, got, map[string]string{"outer": "ok", "enter": "ok", "state": `"missing":["landlock is not available here (operation not permitted): files can be opened anywhere",` +
		`"seccomp is not available here (operation not permitted): any system call can be made"]`})
	want(t, got, map[string]string{"state": `"landlock-abi":0,"seccomp":true,"no-new-privs":true`}) // the container's filter is one
}

// cost measures what workers do once a batch, before and after.
func cost(o Options) {
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		panic(err)
	}
	one := []byte{1, 0, 0, 0, 0, 0, 0, 0}
	measure := func() float64 {
		best := time.Hour
		const n = 500 // short, so that some rounds are not disturbed by other processes
		for range 2000 {
			begin := time.Now()
			for range n {
				_, _ = unix.Write(event, one)
			}
			best = min(best, time.Since(begin))
		}
		return float64(best.Nanoseconds()) / n
	}
	plain := measure()
	enter(o)
	fmt.Printf("cost %.1f %.1f\n", plain, measure())
}

// BenchmarkNotify shows the time of a write to an eventfd without and within the sandbox.
func BenchmarkNotify(b *testing.B) {
	var plain, confined float64
	for b.Loop() {
		text := play(b, "cost", Options{Taps: true}, nil)["cost"]
		if n, err := fmt.Sscan(text, &plain, &confined); n != 2 {
			b.Fatalf("%q: %v", text, err)
		}
	}
	b.ReportMetric(plain, "ns-plain")
	b.ReportMetric(confined, "ns-confined")
}
