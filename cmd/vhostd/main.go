// Command vhostd serves virtio network devices to virtual machines over vhost-user.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/vhostd/vhostd/internal/attach"
	"github.com/vhostd/vhostd/vhostuser"
)

// Exit codes. The split lets a script tell a mistake in its own words from trouble on the host.
const (
	exitFailure = 1 // something failed at run time
	exitUsage   = 2 // wrong flags or configuration
)

// failure marks an error as one of run time; every other error is one of usage.
type failure struct{ err error }

func (f failure) Error() string { return f.err.Error() }
func (f failure) Unwrap() error { return f.err }

func main() {
	vhostuser.PostcopyHelper()
	attach.RunHelper()
	err := newRoot().Execute()
	if err == nil {
		return
	}
	if status, ok := quiet(err); ok {
		os.Exit(status)
	}
	fmt.Fprintln(os.Stderr, "vhostd: "+oneLine(err))
	var f failure
	if errors.As(err, &f) {
		os.Exit(exitFailure)
	}
	os.Exit(exitUsage)
}
