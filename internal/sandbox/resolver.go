package sandbox

import (
	"os"
	"path/filepath"
)

// resolvConf is a variable for the tests.
var resolvConf = "/etc/resolv.conf"

// managers are the directories of programs that may take resolv.conf over while the process runs: systemd-resolved, NetworkManager,
// resolvconf(8), ConnMan.
var managers = []string{"/run/systemd/resolve", "/run/NetworkManager", "/run/resolvconf", "/run/connman"}

// maxLinks is how many symbolic links the kernel follows in one path (path_resolution(7)).
const maxLinks = 40

// linkDirs are the directories from which a file is read that is a symbolic link or is replaced by renaming: those of every link
// on the way and of the file itself. Landlock allows files by inode, so that the file alone would be lost with the next update.
func linkDirs(file string) (dirs []string) {
	for range maxLinks {
		dirs = append(dirs, filepath.Dir(file))
		target, err := os.Readlink(file)
		if err != nil {
			break
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(file), target)
		}
		file = target
	}
	return dirs
}
