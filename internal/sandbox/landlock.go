package sandbox

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/landlock-lsm/go-landlock/landlock"
	access "github.com/landlock-lsm/go-landlock/landlock/syscall"
)

const (
	// ownSockets lets a process make and remove sockets, lock their directory and dial them.
	ownSockets = access.AccessFSMakeSock | access.AccessFSRemoveFile | access.AccessFSReadDir | access.AccessFSResolveUnix
	ownFiles   = access.AccessFSReadFile | access.AccessFSWriteFile | access.AccessFSReadDir | access.AccessFSMakeReg |
		access.AccessFSRemoveFile | access.AccessFSTruncate
	readFiles = access.AccessFSReadFile | access.AccessFSReadDir
	useDevice = access.AccessFSReadFile | access.AccessFSWriteFile | access.AccessFSIoctlDev
)

// restrictPaths enforces what the kernel's version of Landlock knows and returns the version.
func restrictPaths(o Options) (abi int, err error) {
	abi, err = access.LandlockGetABIVersion()
	if err != nil || abi < 1 {
		return 0, fmt.Errorf("landlock is %w (%v): files can be opened anywhere", errMissing, err)
	}
	all := landlock.V11
	// Signals are left to the filter of system calls: before errata 2 of Landlock (Linux 6.15) threads that were confined one by
	// one could not signal each other, which the Go runtime does.
	all.Scoped = access.ScopeAbstractUnixSocket
	if o.Internet {
		all.HandledAccessNet = 0 // guests may reach any port
	}
	notify := os.Getenv("NOTIFY_SOCKET")
	if strings.HasPrefix(notify, "@") {
		all.Scoped = 0
	}
	return abi, all.BestEffort().Restrict(rules(o, notify)...)
}

// rules are the paths that stay open. Files that are open, received or without a name, such as guest memory, need none. Files of
// /proc tell who a front-end is and how much memory and time the process uses.
func rules(o Options, notify string) []landlock.Rule {
	list := []landlock.Rule{landlock.PathAccess(readFiles, "/proc")}
	if len(o.SocketDirs) > 0 {
		list = append(list, landlock.PathAccess(ownSockets, o.SocketDirs...))
	}
	for _, path := range o.Dial {
		list = append(list, landlock.PathAccess(access.AccessFSResolveUnix, existing(filepath.Dir(path))))
	}
	if filepath.IsAbs(notify) {
		list = append(list, landlock.PathAccess(access.AccessFSResolveUnix, notify).IgnoreIfMissing())
	}
	if o.StateDir != "" {
		list = append(list, landlock.PathAccess(ownFiles, o.StateDir))
	}
	if o.Taps {
		list = append(list, landlock.PathAccess(useDevice, "/dev/net/tun").IgnoreIfMissing())
	}
	if o.Names {
		list = append(list, landlock.PathAccess(access.AccessFSReadFile, "/etc/passwd", "/etc/group", "/etc/nsswitch.conf").IgnoreIfMissing())
	}
	if o.Resolver {
		list = append(list, landlock.PathAccess(readFiles, append(linkDirs(resolvConf), managers...)...).IgnoreIfMissing())
	}
	for _, path := range o.Files {
		list = append(list, landlock.PathAccess(readFiles, linkDirs(path)...).IgnoreIfMissing())
	}
	return list
}

// existing returns the path or its nearest parent that exists.
func existing(path string) string {
	for {
		if _, err := os.Stat(path); err == nil || path == filepath.Dir(path) {
			return path
		}
		path = filepath.Dir(path)
	}
}

// below says whether the directory of path is one of the roots or inside of one.
func below(path string, roots []directory) (bool, error) {
	dir, err := filepath.Abs(filepath.Dir(path))
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return false, err
	}
	for {
		info, err := os.Stat(dir)
		if err != nil {
			return false, err
		}
		for _, root := range roots {
			if os.SameFile(info, root.info) {
				return true, nil
			}
		}
		if dir == filepath.Dir(dir) {
			return false, nil
		}
		dir = filepath.Dir(dir)
	}
}
