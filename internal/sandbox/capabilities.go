package sandbox

import (
	"fmt"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// dropCapabilities keeps those of keep that the process has, as permitted and effective ones, takes all others from every thread and
// returns what is left. The bounding set stays: with no_new_privs no program that is executed gains capabilities (cap_bprm_creds_from_file,
// security/commoncap.c), and to empty it takes a call on all threads for each of 41, seconds on a busy machine.
func dropCapabilities(keep []int) (kept uint64, err error) {
	var have [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &have[0]); err != nil {
		return 0, err
	}
	permitted := uint64(have[1].Permitted)<<32 | uint64(have[0].Permitted)
	for _, c := range keep {
		kept |= permitted & (1 << c)
	}
	// Ambient capabilities go with permitted and inheritable ones (capabilities(7)).
	return kept, setCapabilities(kept)
}

// Reaches says whether the process can make and remove files in dir by the ordinary permissions, without CAP_DAC_OVERRIDE.
func Reaches(dir string) bool {
	// The effective set belongs to a thread: this one does without for a moment.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var have [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if unix.Capget(&header, &have[0]) != nil {
		return false
	}
	less := have
	less[0].Effective &^= 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH
	if unix.Capset(&header, &less[0]) != nil {
		return false
	}
	err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
	if unix.Capset(&header, &have[0]) != nil {
		return false
	}
	return err == nil
}

// capabilityNames of the bits of a set, those that this package's callers may keep by name.
func capabilityNames(set uint64) []string {
	names := []string{}
	for c := range 64 {
		if set&(1<<c) == 0 {
			continue
		}
		if i := slices.IndexFunc(known, func(k capability) bool { return k.number == c }); i >= 0 {
			names = append(names, known[i].name)
		} else {
			names = append(names, fmt.Sprint("cap_", c))
		}
	}
	return names
}

type capability struct {
	number int
	name   string
}

// known are the names of include/uapi/linux/capability.h.
var known = []capability{
	{unix.CAP_CHOWN, "cap_chown"}, {unix.CAP_DAC_OVERRIDE, "cap_dac_override"}, {unix.CAP_DAC_READ_SEARCH, "cap_dac_read_search"},
	{unix.CAP_FOWNER, "cap_fowner"}, {unix.CAP_FSETID, "cap_fsetid"}, {unix.CAP_KILL, "cap_kill"}, {unix.CAP_SETGID, "cap_setgid"},
	{unix.CAP_SETUID, "cap_setuid"}, {unix.CAP_SETPCAP, "cap_setpcap"}, {unix.CAP_LINUX_IMMUTABLE, "cap_linux_immutable"},
	{unix.CAP_NET_BIND_SERVICE, "cap_net_bind_service"}, {unix.CAP_NET_BROADCAST, "cap_net_broadcast"}, {unix.CAP_NET_ADMIN, "cap_net_admin"},
	{unix.CAP_NET_RAW, "cap_net_raw"}, {unix.CAP_IPC_LOCK, "cap_ipc_lock"}, {unix.CAP_IPC_OWNER, "cap_ipc_owner"},
	{unix.CAP_SYS_MODULE, "cap_sys_module"}, {unix.CAP_SYS_RAWIO, "cap_sys_rawio"}, {unix.CAP_SYS_CHROOT, "cap_sys_chroot"},
	{unix.CAP_SYS_PTRACE, "cap_sys_ptrace"}, {unix.CAP_SYS_PACCT, "cap_sys_pacct"}, {unix.CAP_SYS_ADMIN, "cap_sys_admin"},
	{unix.CAP_SYS_BOOT, "cap_sys_boot"}, {unix.CAP_SYS_NICE, "cap_sys_nice"}, {unix.CAP_SYS_RESOURCE, "cap_sys_resource"},
	{unix.CAP_SYS_TIME, "cap_sys_time"}, {unix.CAP_SYS_TTY_CONFIG, "cap_sys_tty_config"}, {unix.CAP_MKNOD, "cap_mknod"},
	{unix.CAP_LEASE, "cap_lease"}, {unix.CAP_AUDIT_WRITE, "cap_audit_write"}, {unix.CAP_AUDIT_CONTROL, "cap_audit_control"},
	{unix.CAP_SETFCAP, "cap_setfcap"}, {unix.CAP_MAC_OVERRIDE, "cap_mac_override"}, {unix.CAP_MAC_ADMIN, "cap_mac_admin"},
	{unix.CAP_SYSLOG, "cap_syslog"}, {unix.CAP_WAKE_ALARM, "cap_wake_alarm"}, {unix.CAP_BLOCK_SUSPEND, "cap_block_suspend"},
	{unix.CAP_AUDIT_READ, "cap_audit_read"}, {unix.CAP_PERFMON, "cap_perfmon"}, {unix.CAP_BPF, "cap_bpf"},
	{unix.CAP_CHECKPOINT_RESTORE, "cap_checkpoint_restore"},
}
