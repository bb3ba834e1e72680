package sandbox

import "golang.org/x/sys/unix"

const sysFstatat = unix.SYS_FSTATAT

// Each call that only amd64 has here has a newer form, which is allowed on both.
var archRuntimeCalls, archFileCalls, archWorkerCalls, archSocketCalls []call

const auditArch = unix.AUDIT_ARCH_AARCH64
