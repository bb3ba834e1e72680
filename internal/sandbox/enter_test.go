package sandbox

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	refusedPath = "permission denied"       // by Landlock
	refusedCall = "operation not permitted" // by seccomp
)

func init() {
	roles["attack"], roles["work"], roles["trapped"] = attack, work, func(o Options) {
		enter(o)
		say("mount", unix.Mount("none", "/mnt", "tmpfs", 0, ""))
	}
}

// enter is Enter for a role. Threads are there before: one computes, one waits in the kernel.
func enter(o Options) *Sandbox {
	stop := make(chan struct{})
	var busy sync.WaitGroup
	for i := range 2 {
		busy.Go(func() {
			runtime.LockOSThread()
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				if i == 0 {
					_, _ = unix.Poll(nil, 1)
				}
			}
		})
	}
	s, err := Enter(o)
	close(stop)
	busy.Wait()
	say("enter", err)
	if err != nil {
		os.Exit(0)
	}
	state, err := json.Marshal(s.State())
	fmt.Println("state", string(state), err)
	return s
}

// attack tries what someone would who has taken the process over.
func attack(o Options) {
	parent := os.Getppid()
	enter(o)
	own := o.SocketDirs[0]
	read := func(path string) error {
		f, err := os.Open(path)
		if err == nil {
			f.Close()
		}
		return err
	}
	write := func(path string) error {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			f.Close()
		}
		return err
	}
	say("read-shadow", read("/etc/shadow"))
	say("read-passwd", read("/etc/passwd"))
	say("read-elsewhere", read(filepath.Join(own, "..", "secret")))
	say("write-elsewhere", write(filepath.Join(own, "..", "new")))
	say("write-inside", write(filepath.Join(own, "new")))
	say("write-proc", write("/proc/self/oom_score_adj"))
	say("remove-elsewhere", os.Remove(filepath.Join(own, "..", "secret")))
	say("list-root", func() error { _, err := os.ReadDir("/"); return err }())
	say("tun", func() error { _, err := unix.Open("/dev/net/tun", unix.O_RDWR, 0); return err }())
	_, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(own, "..", "socket"), Net: "unix"})
	say("listen-elsewhere", err)
	program := exec.Command("/bin/true")
	program.Stdin, program.Stdout, program.Stderr = os.Stdin, os.Stdout, os.Stderr
	say("run", program.Run())
	say("execve", unix.Exec("/bin/true", []string{"true"}, nil))
	say("ptrace", unix.PtraceAttach(parent))
	say("signal", unix.Kill(parent, 0))
	say("tgkill", unix.Tgkill(parent, parent, 0))
	say("mount", unix.Mount("none", "/mnt", "tmpfs", 0, ""))
	say("unshare", unix.Unshare(unix.CLONE_NEWUSER))
	say("setuid", unix.Setresuid(65534, 65534, 65534))
	say("chmod", unix.Chmod(own, 0o777))
	say("dumpable", unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0))
	say("core", unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 0, Max: 0}))
	_, err = unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
	say("code", err)
	for name, family := range map[string]int{"inet": unix.AF_INET, "inet6": unix.AF_INET6, "packet": unix.AF_PACKET, "netlink": unix.AF_NETLINK, "vsock": unix.AF_VSOCK} {
		_, err := unix.Socket(family, unix.SOCK_RAW, 0)
		say(name, err)
	}
	for name, number := range map[string]uintptr{"bpf": unix.SYS_BPF, "io_uring": unix.SYS_IO_URING_SETUP, "userfaultfd": unix.SYS_USERFAULTFD,
		"by-handle": unix.SYS_OPEN_BY_HANDLE_AT, "vm-read": unix.SYS_PROCESS_VM_READV, "kexec": unix.SYS_KEXEC_LOAD, "keyctl": unix.SYS_KEYCTL} {
		_, _, errno := unix.Syscall(number, 0, 0, 0)
		say(name, errno)
	}
	_, _, errno := unix.Syscall(unix.SYS_CLONE3, 0, 0, 0)
	say("clone3", errno)
}

func TestAttack(t *testing.T) {
	needRoot(t)
	needLandlock(t)
	base := t.TempDir()
	own := filepath.Join(base, "run")
	if err := os.Mkdir(own, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(base, "secret"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	got := play(t, "attack", Options{SocketDirs: []string{own}}, nil)
	expect := map[string]string{"enter": "ok", "clone3": "function not implemented", "state": `"capabilities":[]`}
	for _, name := range []string{"read-shadow", "read-passwd", "read-elsewhere", "write-elsewhere", "write-inside", "write-proc",
		"remove-elsewhere", "list-root", "tun", "listen-elsewhere"} {
		expect[name] = refusedPath
	}
	for _, name := range []string{"run", "execve", "ptrace", "signal", "tgkill", "mount", "unshare", "setuid", "chmod", "dumpable", "core", "code",
		"inet", "inet6", "packet", "netlink", "vsock", "bpf", "io_uring", "userfaultfd", "by-handle", "vm-read", "kexec", "keyctl"} {
		expect[name] = refusedCall
	}
	want(t, got, expect)
}

// work does what the program must still be able to do.
func work(o Options) {
	parent := os.Getppid()
	s := enter(o)
	own := o.SocketDirs[0]
	for _, dir := range []string{own, filepath.Join(own, "below")} {
		path := filepath.Join(dir, "socket")
		say("allows", s.AllowsSocket(path))
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		say("listen", err)
		c, err := net.Dial("unix", path)
		say("dial", err)
		if err == nil {
			c.Close()
			say("close", l.Close())
		}
	}
	say("not-allowed", s.AllowsSocket("/run/socket"))
	lock, err := unix.Open(own, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	say("lock", err)
	say("flock", unix.Flock(lock, unix.LOCK_EX|unix.LOCK_NB))
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	say("eventfd", err)
	link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", event))
	say("readlink", err)
	fmt.Println("link", link)
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", parent))
	say("comm", err)
	fmt.Println("parent", len(bytes.TrimSpace(comm)) > 0)
	memory, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	say("memfd", err)
	say("truncate", unix.Ftruncate(memory, 1<<20))
	shared, err := unix.Mmap(memory, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	say("mmap", err)
	say("unmap", unix.Munmap(shared))
	say("threads", threads(o.Keep))
	runtime.GC()
	time.Sleep(time.Millisecond)
}

// threads makes some and looks at each: they come from threads that are confined.
func threads(keep []int) error {
	var all sync.WaitGroup
	errs := make(chan error, 32)
	held := make(chan struct{})
	for range cap(errs) {
		all.Go(func() {
			runtime.LockOSThread()
			<-held
			var kept uint64
			for _, c := range keep {
				kept |= 1 << c
			}
			t, err := readThread(fmt.Sprintf("/proc/self/task/%d/status", unix.Gettid()))
			if os.Geteuid() != 0 {
				kept = 0
			}
			if err == nil && (!t.seccomp || !t.noNewPrivs || t.effective != kept || t.permitted != kept) {
				err = fmt.Errorf("a new thread is %+v", t)
			}
			errs <- err
		})
	}
	close(held)
	all.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// TestWork: what is needed works, as root with a capability and as an ordinary user, whose process is not dumpable either.
func TestWork(t *testing.T) {
	for _, user := range []string{"self", "nobody"} {
		t.Run(user, func(t *testing.T) {
			attr := nobody
			if user == "self" {
				attr = nil
			} else {
				needRoot(t)
			}
			own, err := os.MkdirTemp("", "sandbox")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(own) })
			for _, dir := range []string{filepath.Join(own, "below"), own} {
				if err := os.MkdirAll(dir, 0o777); err != nil {
					t.Fatal(err)
				}
				if err := os.Chmod(dir, 0o777); err != nil {
					t.Fatal(err)
				}
			}
			got := play(t, "work", Options{SocketDirs: []string{own}, Keep: []int{unix.CAP_NET_ADMIN}, Trap: true}, attr)
			expect := map[string]string{"link": "anon_inode:[eventfd]", "parent": "true", "state": `"seccomp":true,"no-new-privs":true,"dumpable":false`}
			for _, name := range []string{"enter", "lock", "flock", "eventfd", "readlink", "comm", "memfd", "truncate", "mmap", "unmap", "threads"} {
				expect[name] = "ok"
			}
			for _, name := range []string{"allows", "listen", "dial", "close"} {
				expect[name] = "okok"
			}
			want(t, got, expect)
			if strings.Contains(got["state"], `"landlock-abi":0`) {
				expect = map[string]string{"not-allowed": "ok"}
			} else {
				expect = map[string]string{"not-allowed": own}
			}
			want(t, got, expect)
		})
	}
}

// TestTrap: with Trap a refused call ends the process and says where.
func TestTrap(t *testing.T) {
	r := startRole(t, "trapped", Options{Trap: true}, nil)
	var text strings.Builder
	for r.out.Scan() {
		text.WriteString(r.out.Text() + "\n")
	}
	if err := r.cmd.Wait(); err == nil || !strings.Contains(text.String(), "SIGSYS") || !strings.Contains(text.String(), "unix.Mount") {
		t.Errorf("ended with %v and\n%.2000s", err, text.String())
	}
}
