package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/coreos/go-systemd/v22/activation"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/internal/unixsock"
)

// controlFDName is the FileDescriptorName= of a socket unit that carries the control socket.
const controlFDName = "control"

// inherited are the sockets that a service manager made (sd_listen_fds(3)).
type inherited struct {
	guests  map[string]daemon.Source
	control *unixsock.Listener
	rings   map[string]*os.File // memfds that an earlier process has given into the store, by guest
}

// takeInherited gives every inherited socket to the guest it is named after, to the guest with the
// same path, or to the only guest; the name "control" is the control socket's. A guest that has no
// path yet takes the socket's.
func takeInherited(guests []config.Guest, named bool) (inherited, error) {
	in := inherited{guests: map[string]daemon.Source{}, rings: map[string]*os.File{}}
	for _, f := range activation.Files(true) {
		name := f.Name()
		if guest, ok := strings.CutPrefix(name, ringsFDName); ok {
			in.rings[guest] = f
			continue
		}
		l, err := unixsock.FromFile(f)
		if err != nil {
			return in, err
		}
		if name == controlFDName {
			in.control = l
			continue
		}
		g := ownerOf(l, name, guests, named)
		if g == nil || in.guests[g.Name].Listener != nil {
			return in, fmt.Errorf("inherited socket %s (%s): no guest has this name or path: give FileDescriptorName= the guest's name", name, l.Path())
		}
		if g.Socket == "" {
			g.Socket = l.Path()
		}
		in.guests[g.Name] = daemon.Source{Listener: l}
	}
	return in, nil
}

func ownerOf(l *unixsock.Listener, name string, guests []config.Guest, named bool) *config.Guest {
	for i := range guests {
		g := &guests[i]
		if g.Name == name || g.Socket != "" && filepath.Clean(g.Socket) == filepath.Clean(l.Path()) {
			return g
		}
	}
	if !named && len(guests) == 1 && guests[0].Socket == "" {
		return &guests[0]
	}
	return nil
}

// readiness is the line that tells a script what can be connected to.
func readiness(guests []config.GuestSpec, control string) string {
	var listening, dialing []string
	for _, g := range guests {
		if g.Client {
			dialing = append(dialing, g.Socket)
		} else {
			listening = append(listening, g.Socket)
		}
	}
	if len(guests) == 0 && control != "" {
		listening = append(listening, control)
	}
	line := strings.TrimSpace("listening " + strings.Join(listening, " "))
	if len(dialing) > 0 {
		line += " dialing " + strings.Join(dialing, " ")
	}
	if len(listening) == 0 {
		line = strings.TrimPrefix(line, "listening ")
	}
	return line + "\n"
}
