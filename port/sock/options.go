package sock

import (
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/vhostd/vhostd/internal/unixsock"
	"github.com/vhostd/vhostd/port"
)

const kind = "sock"

// Options configure a socket network.
type Options struct {
	// Path is the socket's, of at most unixsock.MaxPath bytes.
	Path string
	// Connect dials a socket that the peer made, again and again until it is there. Otherwise the network makes the socket
	// and removes it at the end.
	Connect bool
	// Mode are the permissions of the socket that the network makes; connecting needs write permission. 0: 0600.
	Mode fs.FileMode
	// Logger gets a line when a peer comes and goes. nil: slog.Default().
	Logger *slog.Logger
}

// Validate returns a [port.OptionError] for the first option with a value that is not accepted.
func (o Options) Validate() error {
	if o.Path == "" {
		return &port.OptionError{Kind: kind, Option: "path", Accept: "a path in the file system, such as /run/vhostd/net.sock"}
	}
	if err := unixsock.CheckPath(o.Path); err != nil {
		return fmt.Errorf("network %s: path: %w", kind, err)
	}
	if o.Mode&^0o777 != 0 {
		return &port.OptionError{Kind: kind, Option: "mode", Value: fmt.Sprintf("%#o", uint32(o.Mode)), Accept: "octal permissions such as 0660"}
	}
	return nil
}
