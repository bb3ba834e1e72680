package main

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/sandbox"
	"github.com/vhostd/vhostd/internal/unixsock"
)

// trapVariable makes a refused system call end the process instead of failing; the tests set it.
const trapVariable = "VHOSTD_SANDBOX_TRAP"

// confine drops what the process does not need after its start. control is the control socket, nil without one.
func (p *plan) confine(r *running, control *unixsock.Listener) error {
	if !p.process.Sandbox {
		r.log.Warn("the sandbox is off: the process keeps all its rights")
		return nil
	}
	needs, err := p.needs(control)
	if err != nil {
		return err
	}
	s, err := sandbox.Enter(needs)
	if err != nil {
		return err
	}
	r.daemon.Confined(s)
	state := s.State()
	for _, what := range state.Missing {
		r.log.Warn("the sandbox is incomplete", "reason", what)
	}
	r.log.Info("sandboxed", "landlock-abi", state.Landlock, "seccomp", state.Seccomp, "no-new-privs", state.NoNewPrivs,
		"capabilities", state.Capabilities, "socket-dirs", state.SocketDirs)
	return nil
}

// needs are what guests, and those that the control socket may add, still want of the system. docs/threat-model.md has the table.
func (p *plan) needs(control *unixsock.Listener) (sandbox.Options, error) {
	later := control != nil || p.reload != nil // guests of any kind may be added
	o := sandbox.Options{
		Postcopy: p.process.Postcopy, Names: later, Taps: later, Internet: later, Resolver: later, Trap: os.Getenv(trapVariable) == "1",
	}
	if p.reload != nil {
		o.Files = append(o.Files, p.reload.file)
	}
	dirs := p.process.SocketDirs
	if control != nil && (p.control == nil || exists(filepath.Dir(control.Path()))) {
		dirs = append(dirs, filepath.Dir(control.Path()))
	}
	owners, reaches := false, true
	for _, g := range p.guests {
		o.Taps = o.Taps || g.Network.ManagesInterfaces()
		if g.Network.UsesSockets() {
			o.Internet, o.Resolver = true, true
		}
		if path, dials := g.Network.Socket(); dials {
			o.Dial = append(o.Dial, path)
			reaches = false
		} else if path != "" {
			dirs = append(dirs, filepath.Dir(path))
		}
		for _, path := range g.Network.PublishPaths() {
			dirs = append(dirs, filepath.Dir(path))
		}
		owners = owners || g.Listen.UID >= 0 || g.Listen.GID >= 0
		from := p.sources[g.Name]
		switch {
		case from.Conn != nil || from.Listener != nil:
		case g.Client:
			o.Dial = append(o.Dial, g.Socket)
			reaches = false // the front-end's socket may belong to anybody
		default:
			dirs = append(dirs, filepath.Dir(g.Socket))
		}
	}
	for _, dir := range dirs {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return o, err
		}
		o.SocketDirs = append(o.SocketDirs, abs)
		reaches = reaches && sandbox.Reaches(abs)
	}
	if p.process.StateDir != "" {
		abs, err := filepath.Abs(p.process.StateDir)
		if err != nil {
			return o, err
		}
		o.StateDir = abs
	}
	if o.Taps {
		o.Keep = append(o.Keep, unix.CAP_NET_ADMIN)
	}
	if !reaches {
		o.Keep = append(o.Keep, unix.CAP_DAC_OVERRIDE)
	}
	if owners && later {
		o.Keep = append(o.Keep, unix.CAP_CHOWN)
	}
	return o, nil
}

// exists says whether an inherited socket's directory is here: it may have been made elsewhere, or have no path.
func exists(dir string) bool {
	_, err := os.Stat(dir)
	return filepath.IsAbs(dir) && err == nil
}
