package sandbox

import (
	"os"

	"golang.org/x/sys/unix"
)

// What one part of the program asks of the kernel. A new feature adds its calls to a group, or a group of its own; the tests run with
// Trap, so that a call which is not listed ends the program there.

// hotCalls are what workers call all the time. Kernels since 5.11 keep a bitmap of the calls that are allowed whatever the arguments
// are, and run the filter for none of them (seccomp_cache_check_allow, kernel/seccomp.c); on older ones the order matters.
var hotCalls = anyArguments(unix.SYS_WRITE, unix.SYS_PREADV2, unix.SYS_EPOLL_PWAIT, unix.SYS_FUTEX, unix.SYS_WRITEV, unix.SYS_READV,
	unix.SYS_READ, unix.SYS_IO_SUBMIT, unix.SYS_IO_GETEVENTS)

// runtimeCalls are those of the Go runtime, of libc where there is one (race detector), and of any Go program: threads, memory,
// signals, time.
func runtimeCalls() []call {
	return append(append(anyArguments(
		unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_RESTART_SYSCALL,
		unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_GETPID, unix.SYS_GETTID, unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_GETGID, unix.SYS_GETEGID, unix.SYS_GETRANDOM,
		unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_MREMAP, unix.SYS_BRK, unix.SYS_MINCORE, unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
		unix.SYS_SET_ROBUST_LIST, unix.SYS_RSEQ), archRuntimeCalls...),
		// Threads, neither processes nor namespaces.
		call{unix.SYS_CLONE, []condition{hasAll(0, unix.CLONE_THREAD), hasNone(0, newNamespace)}},
		// Memory is never code.
		call{unix.SYS_MMAP, []condition{hasNone(2, unix.PROT_EXEC)}},
		call{unix.SYS_MPROTECT, []condition{hasNone(2, unix.PROT_EXEC)}},
		// Names of the heap's mappings, and the look at what is in force.
		call{unix.SYS_PRCTL, []condition{equal(0, unix.PR_SET_VMA)}},
		call{unix.SYS_PRCTL, []condition{equal(0, unix.PR_GET_DUMPABLE)}},
		// Limits of this process, which are read.
		call{unix.SYS_PRLIMIT64, []condition{equal(0, 0), equal(2, 0)}},
		// Signals to this process.
		call{unix.SYS_TGKILL, []condition{equal(0, uint64(os.Getpid()))}},
	)
}

// newNamespace are the flags of clone(2) that make namespaces; CLONE_NEWTIME is one of clone3(2) alone.
const newNamespace = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER |
	unix.CLONE_NEWPID | unix.CLONE_NEWNET

// fileCalls read, and take down what is open. Landlock says which paths.
var fileCalls = append(anyArguments(unix.SYS_OPENAT, unix.SYS_CLOSE, unix.SYS_FSTAT, sysFstatat, unix.SYS_FSTATFS, unix.SYS_STATFS, unix.SYS_LSEEK,
	unix.SYS_PREAD64, unix.SYS_READLINKAT, unix.SYS_GETDENTS64, unix.SYS_FCNTL, unix.SYS_GETCWD), archFileCalls...)

// workerCalls watch descriptors, notify guests and hold guest memory.
var workerCalls = append(anyArguments(unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_CREATE1, unix.SYS_EVENTFD2, unix.SYS_PPOLL, unix.SYS_TIMERFD_CREATE,
	unix.SYS_TIMERFD_SETTIME, unix.SYS_MEMFD_CREATE, unix.SYS_FTRUNCATE, unix.SYS_FALLOCATE, unix.SYS_IO_SETUP, unix.SYS_IO_DESTROY), archWorkerCalls...)

// socketCalls serve front-ends and the control socket.
var socketCalls = append(append(anyArguments(unix.SYS_ACCEPT4, unix.SYS_BIND, unix.SYS_LISTEN, unix.SYS_CONNECT, unix.SYS_GETSOCKNAME,
	unix.SYS_GETPEERNAME, unix.SYS_GETSOCKOPT, unix.SYS_SETSOCKOPT, unix.SYS_RECVMSG, unix.SYS_SENDMSG, unix.SYS_RECVFROM, unix.SYS_SENDTO,
	unix.SYS_SHUTDOWN, unix.SYS_UNLINKAT, unix.SYS_UMASK, unix.SYS_FLOCK, unix.SYS_FCHOWNAT), archSocketCalls...),
	call{unix.SYS_SOCKET, []condition{equal(0, unix.AF_UNIX)}})

// stateCalls move the device state of a migration between the front-end's pipe and one of ours.
var stateCalls = anyArguments(unix.SYS_PIPE2, unix.SYS_SPLICE)

// tapCalls make and configure interfaces, and ask about those that are there.
var tapCalls = append(requests(unix.TUNSETIFF, unix.TUNGETIFF, unix.TUNSETQUEUE, unix.TUNSETOFFLOAD, unix.TUNSETVNETHDRSZ,
	unix.TUNSETVNETLE, unix.TUNSETOWNER, unix.TUNSETGROUP, unix.TUNSETPERSIST),
	call{unix.SYS_SOCKET, []condition{equal(0, unix.AF_NETLINK), equal(2, unix.NETLINK_ROUTE)}})

// internetCalls reach other hosts: stream and datagram sockets, raw ones not. How much a socket holds is asked of it.
var internetCalls = append(requests(unix.TIOCINQ),
	internetSocket(unix.AF_INET, unix.SOCK_STREAM), internetSocket(unix.AF_INET, unix.SOCK_DGRAM),
	internetSocket(unix.AF_INET6, unix.SOCK_STREAM), internetSocket(unix.AF_INET6, unix.SOCK_DGRAM))

func internetSocket(family, kind uint64) call {
	const typeMask = 0xf // SOCK_TYPE_MASK, include/linux/net.h
	return call{unix.SYS_SOCKET, []condition{equal(0, family), {1, typeMask, kind}}}
}

// postcopyCalls talk to the processes that populate the memory of guests that arrive. Those are started, and have
// a userfaultfd, outside of the sandbox; the one that starts the others is waited for at the end.
var postcopyCalls = append(anyArguments(unix.SYS_WAITID, unix.SYS_WAIT4), call{unix.SYS_SOCKETPAIR, []condition{equal(0, unix.AF_UNIX)}})

// absentCalls do not exist for the program: who tries them has another way.
var absentCalls = anyArguments(unix.SYS_CLONE3)

// allowed are the calls that o needs, the most frequent ones first.
func allowed(o Options) []call {
	groups := [][]call{hotCalls, runtimeCalls(), detectorCalls, workerCalls, socketCalls, fileCalls, stateCalls}
	if o.Taps {
		groups = append(groups, tapCalls)
	}
	if o.Internet {
		groups = append(groups, internetCalls)
	}
	if o.Postcopy {
		groups = append(groups, postcopyCalls)
	}
	var all []call
	for _, g := range groups {
		all = append(all, g...)
	}
	return all
}

func anyArguments(numbers ...uint32) []call {
	list := make([]call, len(numbers))
	for i, n := range numbers {
		list[i].number = n
	}
	return list
}

// requests are ioctl(2) with one of the requests.
func requests(numbers ...uint64) []call {
	list := make([]call, len(numbers))
	for i, n := range numbers {
		list[i] = call{unix.SYS_IOCTL, []condition{equal(1, n)}}
	}
	return list
}
