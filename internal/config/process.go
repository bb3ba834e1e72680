package config

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vhostd/vhostd/internal/unixsock"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/worker"
)

// Limits of the process's keys.
const (
	MinArena = 16 << 20
	MaxArena = 64 << 30
	MaxCPU   = 1023 // the highest CPU number in the kernel's fixed-size affinity mask
	MaxSpin  = 10 * time.Second
)

// Process holds the keys that belong to the daemon as a whole.
type Process struct {
	Control        string `yaml:"control"`
	ControlMode    string `yaml:"control-mode"`
	Wake           string `yaml:"wake"`
	Spin           string `yaml:"spin"`
	CPUs           string `yaml:"cpus"`
	ArenaSize      string `yaml:"arena-size"`
	ArenaHugePages string `yaml:"arena-hugepages"`
	ArenaNode      string `yaml:"arena-node"`
	Sandbox        string `yaml:"sandbox"`
	SocketDirs     string `yaml:"socket-dirs"`
	StateDir       string `yaml:"state-dir"`
	Postcopy       string `yaml:"postcopy"`
	LogLevel       string `yaml:"log-level"`
	LogFormat      string `yaml:"log-format"`
}

// DefaultProcess returns a Process with every default filled in.
func DefaultProcess() Process {
	return Process{
		ControlMode: "0600", Wake: "adaptive", Spin: "50us", ArenaSize: "256MiB", ArenaHugePages: "off", Sandbox: "on", Postcopy: "off",
		LogLevel: "info", LogFormat: "text",
	}
}

// ProcessSpec is a Process after Parse.
type ProcessSpec struct {
	Control       string // empty: no control socket
	ControlListen unixsock.Options
	Wake          worker.Wake
	Spin          time.Duration
	CPUs          []int // one worker for each; empty: one worker that is not pinned
	Arena         pagemem.Config
	Sandbox       bool     // drop after the start what is not needed any more
	SocketDirs    []string // further directories for the sockets of guests added later
	StateDir      string   // empty: the state ends with the process
	Postcopy      bool
	LogLevel      slog.Level
	LogFormat     string // text or json
}

// LogFormats are the accepted values of log-format.
func LogFormats() []string { return []string{"text", "json"} }

// SandboxModes are the accepted values of sandbox.
func SandboxModes() []string { return []string{"on", "off"} }

// Parse checks every key and returns the usable form. The error is a *KeyError.
func (p Process) Parse() (ProcessSpec, error) {
	spec := ProcessSpec{Control: p.Control, StateDir: p.StateDir, LogFormat: p.LogFormat}
	if p.Control != "" {
		if err := unixsock.CheckPath(p.Control); err != nil {
			return spec, &KeyError{Key: "control", Err: err}
		}
	}
	mode, err := parseMode(p.ControlMode)
	if err != nil {
		return spec, &KeyError{Key: "control-mode", Err: err}
	}
	spec.ControlListen = unixsock.Options{Mode: mode, UID: -1, GID: -1}
	if spec.Wake, err = worker.ParseWake(p.Wake); err != nil {
		return spec, &KeyError{Key: "wake", Err: err}
	}
	if spec.Spin, err = time.ParseDuration(p.Spin); err != nil || spec.Spin < 0 || spec.Spin > MaxSpin {
		return spec, keyErrorf("spin", "%q: accepted are durations from 0s to %v, such as 50us", p.Spin, MaxSpin)
	}
	if spec.CPUs, err = parseCPUs(p.CPUs); err != nil {
		return spec, &KeyError{Key: "cpus", Err: err}
	}
	if spec.Arena, err = p.parseArena(); err != nil {
		return spec, err
	}
	if spec.Sandbox = p.Sandbox == "on"; !slices.Contains(SandboxModes(), p.Sandbox) {
		return spec, keyErrorf("sandbox", "%q: accepted are %s", p.Sandbox, strings.Join(SandboxModes(), " and "))
	}
	if spec.SocketDirs, err = parseDirs(p.SocketDirs); err != nil {
		return spec, &KeyError{Key: "socket-dirs", Err: err}
	}
	if spec.Postcopy = p.Postcopy == "on"; !slices.Contains(SandboxModes(), p.Postcopy) {
		return spec, keyErrorf("postcopy", "%q: accepted are %s", p.Postcopy, strings.Join(SandboxModes(), " and "))
	}
	if err := spec.LogLevel.UnmarshalText([]byte(p.LogLevel)); err != nil {
		return spec, keyErrorf("log-level", "%q: accepted are debug, info, warn and error", p.LogLevel)
	}
	if !slices.Contains(LogFormats(), p.LogFormat) {
		return spec, keyErrorf("log-format", "%q: accepted are %s", p.LogFormat, strings.Join(LogFormats(), " and "))
	}
	return spec, nil
}

// ParseCPUs reads a list of processors as the key cpus does, for the flag of another command. The error is a *KeyError.
func ParseCPUs(key, text string) ([]int, error) {
	cpus, err := parseCPUs(text)
	if err != nil {
		return nil, &KeyError{Key: key, Err: err}
	}
	return cpus, nil
}

// parseCPUs reads a list such as "0,2-3". Empty gives none.
func parseCPUs(text string) ([]int, error) {
	if text == "" {
		return nil, nil
	}
	var cpus []int
	for part := range strings.SplitSeq(text, ",") {
		low, high, isRange := strings.Cut(part, "-")
		first, err := strconv.ParseUint(low, 10, 16)
		last := first
		if err == nil && isRange {
			last, err = strconv.ParseUint(high, 10, 16)
		}
		if err != nil || last < first || last > MaxCPU {
			return nil, fmt.Errorf("%q: accepted are numbers from 0 to %d and ranges, such as 0,2-3", text, MaxCPU)
		}
		for cpu := int(first); cpu <= int(last); cpu++ {
			if slices.Contains(cpus, cpu) {
				return nil, fmt.Errorf("%q: CPU %d is listed twice", text, cpu)
			}
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}

// parseDirs reads absolute paths, separated by commas. Whether they exist is seen when they are used.
func parseDirs(text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	dirs := strings.Split(text, ",")
	for _, dir := range dirs {
		if !filepath.IsAbs(dir) {
			return nil, fmt.Errorf("%q: accepted are absolute paths of directories, separated by commas", dir)
		}
	}
	return dirs, nil
}

// parseSize reads a number of bytes with an optional K, M or G (powers of 1,024; "iB" may follow).
func parseSize(text string) (uint64, error) {
	digits := strings.TrimRight(text, "KMGiB")
	shift, ok := map[string]uint{"": 0, "B": 0, "K": 10, "KiB": 10, "M": 20, "MiB": 20, "G": 30, "GiB": 30}[text[len(digits):]]
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || !ok {
		return 0, fmt.Errorf("%q is not a size", text)
	}
	return n << shift, nil
}
