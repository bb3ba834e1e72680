package main

import (
	"errors"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"
)

// ringsFDName begins the names under which memfds about guests' rings are kept in the service manager's
// file descriptor store (FileDescriptorStoreMax= in systemd.service(5)).
const ringsFDName = "rings-"

// keepFD asks the service manager to keep a duplicate of f over a restart, crash included (sd_pid_notify_with_fds(3)). One
// that has no room drops it silently. Without a service manager nothing happens.
func keepFD(log *slog.Logger, name string, f *os.File) {
	if err := notifyFD("FDSTORE=1\nFDNAME="+name, int(f.Fd())); err != nil {
		log.Warn("the service manager keeps no file descriptor", "name", name, "err", err)
	}
}

// dropFD takes it back.
func dropFD(log *slog.Logger, name string) {
	if err := notifyFD("FDSTOREREMOVE=1\nFDNAME=" + name); err != nil {
		log.Warn("the service manager was not told to forget a file descriptor", "name", name, "err", err)
	}
}

func notifyFD(state string, fds ...int) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	err = unix.Sendmsg(socket, []byte(state), rights, &unix.SockaddrUnix{Name: path}, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	return errors.Join(os.NewSyscallError("sendmsg", err), unix.Close(socket))
}
