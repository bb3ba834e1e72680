package sandbox

import "golang.org/x/sys/unix"

const sysFstatat = unix.SYS_NEWFSTATAT

// Calls that newer architectures lack, and which the Go runtime or its standard library prefer here.
var (
	archRuntimeCalls = anyArguments(unix.SYS_ARCH_PRCTL)
	archFileCalls    = anyArguments()
	archWorkerCalls  = anyArguments(unix.SYS_EPOLL_WAIT, unix.SYS_POLL)
	archSocketCalls  = anyArguments(unix.SYS_LCHOWN)
)

const auditArch = unix.AUDIT_ARCH_X86_64
