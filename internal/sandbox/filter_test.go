package sandbox

import (
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// data is struct seccomp_data.
type data struct {
	number, arch uint32
	args         [6]uint64
}

func (d data) word(t fataler, offset uint32) uint32 {
	switch {
	case offset == offsetNumber:
		return d.number
	case offset == offsetArch:
		return d.arch
	case offset < offsetArgs || offset >= offsetArgs+48 || offset%4 != 0:
		t.Fatalf("load from %d", offset)
	}
	return uint32(d.args[(offset-offsetArgs)/8] >> (8 * (offset % 8)))
}

type fataler interface{ Fatalf(string, ...any) }

// interpret runs a filter as the kernel does (net/core/filter.c), for the instructions that are used here.
func interpret(t fataler, p []unix.SockFilter, d data) uint32 {
	var acc uint32
	for pc := 0; pc < len(p); pc++ {
		switch i := p[pc]; i.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			acc = d.word(t, i.K)
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			acc &= i.K
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			if acc == i.K {
				pc += int(i.Jt)
			} else {
				pc += int(i.Jf)
			}
		case unix.BPF_RET | unix.BPF_K:
			return i.K
		default:
			t.Fatalf("instruction %d: code %#x", pc, i.Code)
		}
	}
	t.Fatalf("the program runs over its end")
	return 0
}

// decide is what the filter means.
func decide(calls, absent []call, refuse uint32, d data) uint32 {
	meets := func(c call) bool {
		return c.number == d.number && !slices.ContainsFunc(c.conditions, func(k condition) bool { return d.args[k.argument]&k.mask != k.value })
	}
	switch {
	case d.arch != auditArch:
		return refuse
	case slices.ContainsFunc(calls, meets):
		return unix.SECCOMP_RET_ALLOW
	case slices.ContainsFunc(absent, meets):
		return unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	}
	return refuse
}

// TestProgram compares the compiled filter with its meaning. Arguments are often near those of the conditions and often numbers of
// system calls, so that a value left in the accumulator would show.
func TestProgram(t *testing.T) {
	const refuse = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	for _, o := range []Options{{}, {Taps: true}} {
		calls := allowed(o)
		p := program(calls, absentCalls, refuse)
		if len(p) > 4096 { // BPF_MAXINSNS
			t.Fatalf("%d instructions", len(p))
		}
		var values []uint64
		var conditional []uint32
		for _, c := range calls {
			if len(c.conditions) > 0 {
				conditional, values = append(conditional, c.number), append(values, uint64(c.number))
			}
			for _, k := range c.conditions {
				values = append(values, k.value, k.mask, ^k.mask, k.value|1<<40)
			}
		}
		argument := rapid.OneOf(rapid.SampledFrom(values), rapid.Uint64Range(0, 500))
		number := rapid.OneOf(rapid.SampledFrom(conditional), rapid.SampledFrom(conditional), rapid.Uint32Range(0, 500))
		rapid.Check(t, func(t *rapid.T) {
			for range 50 {
				d := data{number: number.Draw(t, "number"), arch: rapid.SampledFrom([]uint32{auditArch, auditArch, unix.AUDIT_ARCH_I386}).Draw(t, "arch")}
				if rapid.IntRange(0, 20).Draw(t, "x32") == 0 {
					d.number |= 0x40000000
				}
				for i := range 3 {
					d.args[i] = argument.Draw(t, "argument")
				}
				if got, want := interpret(t, p, d), decide(calls, absentCalls, refuse, d); got != want {
					t.Fatalf("%+v: %#x, want %#x", d, got, want)
				}
			}
		})
	}
}

// TestRefused names what must stay out of every list.
func TestRefused(t *testing.T) {
	never := []uint32{
		unix.SYS_EXECVE, unix.SYS_EXECVEAT, unix.SYS_PTRACE, unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_BPF,
		unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_OPEN_BY_HANDLE_AT,
		unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PROCESS_MADVISE, unix.SYS_PIDFD_GETFD, unix.SYS_PERF_EVENT_OPEN,
		unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_KEYCTL, unix.SYS_ADD_KEY,
		unix.SYS_SETUID, unix.SYS_SETGID, unix.SYS_SETRESUID, unix.SYS_CAPSET, unix.SYS_SECCOMP, unix.SYS_USERFAULTFD, unix.SYS_KILL,
		unix.SYS_TKILL, unix.SYS_RT_TGSIGQUEUEINFO, unix.SYS_FCHMOD, unix.SYS_FCHMODAT, unix.SYS_SETXATTR, unix.SYS_LINKAT, unix.SYS_SYMLINKAT,
		unix.SYS_MKNODAT, unix.SYS_MKDIRAT, unix.SYS_REBOOT, unix.SYS_SWAPON, unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_SETHOSTNAME,
		unix.SYS_MOVE_MOUNT, unix.SYS_FSOPEN, unix.SYS_OPEN_TREE, unix.SYS_MEMFD_SECRET,
	}
	for _, c := range allowed(Options{Taps: true}) {
		if slices.Contains(never, c.number) {
			t.Errorf("system call %d is allowed", c.number)
		}
	}
	pid := uint64(os.Getpid())
	for _, d := range []data{
		{number: unix.SYS_SOCKET, args: [6]uint64{unix.AF_INET, unix.SOCK_STREAM}},
		{number: unix.SYS_SOCKET, args: [6]uint64{unix.AF_INET6, unix.SOCK_DGRAM}},
		{number: unix.SYS_SOCKET, args: [6]uint64{unix.AF_PACKET, unix.SOCK_RAW}},
		{number: unix.SYS_SOCKET, args: [6]uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}},
		{number: unix.SYS_SOCKET, args: [6]uint64{1<<32 | unix.AF_UNIX, unix.SOCK_STREAM}},
		{number: unix.SYS_CLONE, args: [6]uint64{uint64(unix.SIGCHLD)}},
		{number: unix.SYS_CLONE, args: [6]uint64{unix.SYS_MMAP}}, // the number of a call as the argument of another one
		{number: unix.SYS_CLONE, args: [6]uint64{unix.CLONE_THREAD | unix.CLONE_NEWUSER}},
		{number: unix.SYS_MMAP, args: [6]uint64{0, 4096, unix.PROT_READ | unix.PROT_EXEC}},
		{number: unix.SYS_MPROTECT, args: [6]uint64{0, 4096, unix.PROT_EXEC}},
		{number: unix.SYS_PRCTL, args: [6]uint64{unix.PR_SET_DUMPABLE, 1}},
		{number: unix.SYS_PRLIMIT64, args: [6]uint64{0, unix.RLIMIT_CORE, 4096}},
		{number: unix.SYS_PRLIMIT64, args: [6]uint64{1, unix.RLIMIT_CORE}},
		{number: unix.SYS_TGKILL, args: [6]uint64{pid + 1, pid + 1, 9}},
		{number: unix.SYS_IOCTL, args: [6]uint64{0, unix.TIOCSTI}},
		{number: unix.SYS_IOCTL, args: [6]uint64{0, unix.TUNATTACHFILTER}},
	} {
		d.arch = auditArch
		if got := interpret(t, program(allowed(Options{Taps: true}), absentCalls, 1), d); got != 1 {
			t.Errorf("%+v: %#x", d, got)
		}
	}
}
