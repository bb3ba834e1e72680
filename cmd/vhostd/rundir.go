package main

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// runDirPrefix begins the names of the directories that sockets of vhostd run are in. runLock is a file in each, locked as long as
	// its vhostd run lives.
	runDirPrefix = "vhostd-run-"
	runLock      = "lock"
)

// runDir is a directory for a socket that nobody else may enter.
type runDir struct {
	path string
	lock *os.File
}

// makeRunDir makes it, and removes those of this user whose processes were killed. The user's runtime directory is a tmpfs that goes with
// the session.
func makeRunDir() (*runDir, error) {
	var errs []error
	for _, parent := range []string{cmp.Or(os.Getenv("XDG_RUNTIME_DIR"), os.TempDir()), "/tmp"} {
		clearRunDirs(parent)
		for range 3 { // somebody who clears up may have taken it for one that was left
			d, err := tryRunDir(parent)
			if err == nil {
				return d, nil
			}
			errs = append(errs, err)
		}
	}
	return nil, errors.Join(errs...)
}

func tryRunDir(parent string) (d *runDir, err error) {
	d = &runDir{}
	if d.path, err = os.MkdirTemp(parent, runDirPrefix); err != nil {
		return nil, err
	}
	lock := filepath.Join(d.path, runLock)
	if d.lock, err = os.OpenFile(lock, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, errors.Join(err, os.RemoveAll(d.path))
	}
	if err = unix.Flock(int(d.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		// ORDER: whoever clears up removes the file with the lock held, so that a file which is there now stays.
		_, err = os.Lstat(lock)
	}
	if err != nil {
		return nil, errors.Join(err, d.remove())
	}
	return d, nil
}

// remove removes the directory and what is in it.
func (d *runDir) remove() error {
	return errors.Join(os.RemoveAll(d.path), d.lock.Close())
}

// clearRunDirs removes the directories that nobody locks. Whatever cannot be removed stays: the next start tries again.
func clearRunDirs(parent string) {
	dirs, _ := filepath.Glob(filepath.Join(parent, runDirPrefix+"*")) // the pattern is a good one, unless the parent's name is none
	for _, dir := range dirs {
		info, err := os.Lstat(dir)
		if err != nil || !info.IsDir() || info.Mode().Perm() != 0o700 {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
			continue // anybody may make files in /tmp
		}
		lock, err := os.OpenFile(filepath.Join(dir, runLock), os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			_ = os.RemoveAll(dir)
		}
		_ = lock.Close() // nothing was written
	}
}
