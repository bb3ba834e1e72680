package uffd

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// nobody is the user and the group without rights that all distributions number so.
const nobody = 65534

// dropPrivileges makes the superuser nobody and drops every capability, of all threads. In a program with cgo
// capabilities go with the superuser only.
func dropPrivileges() {
	if unix.Geteuid() == 0 {
		_ = syscall.Setgroups(nil)
		_ = syscall.Setresgid(nobody, nobody, nobody)
		_ = syscall.Setresuid(nobody, nobody, nobody)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	// SAFETY: the kernel reads a header of version 3 and its two sets, which live as long as the function.
	_, _, _ = syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&none[0])), 0)
	_, _, _ = syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0)
}
