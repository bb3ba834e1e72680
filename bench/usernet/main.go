// Command usernet measures the user network of vhostd against its peers: slirp4netns, passt and gvproxy. `scripts/bench.sh usernet` builds
// and runs it. It needs root, for network namespaces that play the host and the guest; nothing leaves the machine. A round measures every
// peer once, every second round in reverse order (A B B A); what is printed are medians with the range, and medians of the ratios within
// a round. What is not installed is left out, and named.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// settings are the flags.
type settings struct {
	vhostd, baseline string
	flags, oldFlags  []string // of serve and attach
	gvproxy          string   // folder
	cells, peers     []string
	only             []string
	rounds           int
	length           time.Duration
	mebibytes        int64
	flows            int
	oneShots         int
	json             bool
}

// cells are the parts of the measurement, by name.
var cells = []struct {
	name string
	run  func(*settings, *report) error
}{{"native", runNative}, {"guest", runGuests}, {"memory", runMemory}, {"udpflows", runOneShots}}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "client" {
		os.Exit(client(os.Args[2:]))
	}
	s, err := parse()
	if err == nil && os.Geteuid() != 0 {
		err = errors.New("needs root, for network namespaces")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "usernet:", err)
		os.Exit(2)
	}
	if err := run(s); err != nil {
		fmt.Fprintln(os.Stderr, "usernet:", err)
		os.Exit(1)
	}
}

func parse() (*settings, error) {
	s := &settings{}
	list := func(text string) []string { return strings.FieldsFunc(text, func(r rune) bool { return r == ',' }) }
	flag.StringVar(&s.vhostd, "vhostd", "bin/vhostd", "program to measure (`PATH`)")
	flag.StringVar(&s.baseline, "baseline", "", "another build of vhostd, measured as the peer old (`PATH`)")
	flag.StringVar(&s.gvproxy, "gvproxy", "",
		"folder with gvproxy and vm of gvisor-tap-vsock (`FOLDER`); without, they are built in a temporary one")
	flags := flag.String("flags", "", "further `FLAGS` of vhostd serve and attach, such as '--wake block'")
	oldFlags := flag.String("baseline-flags", "", "those `FLAGS` of the peer old")
	names := flag.String("cells", "native,guest,memory", "`LIST` of native, guest, memory, udpflows (a minute)")
	peers := flag.String("peers", "vhostd,old,slirp4netns,passt,gvproxy,slirp,tap",
		"`LIST` of what to measure; slirp and tap are QEMU's, for the cell guest")
	only := flag.String("only", "",
		"`LIST` of measurements of the cells native and guest: stream, rate, connects, trips, datagrams (default all)")
	flag.IntVar(&s.rounds, "rounds", 4, "number of rounds (`N`)")
	flag.DurationVar(&s.length, "length", 3*time.Second, "length of a measurement that has one (`DURATION`)")
	flag.Int64Var(&s.mebibytes, "mebibytes", 128, "size of a stream of the cell guest (`MIB`)")
	flag.IntVar(&s.flows, "flows", 10_000, "connections of the cell memory (`N`)")
	flag.IntVar(&s.oneShots, "one-shots", 50_000, "datagrams of the cell udpflows, each a flow, in a minute (`N`)")
	flag.BoolVar(&s.json, "json", false, "print JSON instead of tables")
	flag.Parse()
	s.flags, s.oldFlags = strings.Fields(*flags), strings.Fields(*oldFlags)
	s.cells, s.peers, s.only = list(*names), list(*peers), list(*only)
	if flag.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}
	if s.rounds < 1 || s.length < 100*time.Millisecond || s.mebibytes < 1 || s.flows < 1 || s.oneShots < 60 {
		return nil, errors.New("-rounds, -mebibytes and -flows are at least 1, -length at least 100ms, -one-shots at least 60")
	}
	for _, name := range s.cells {
		if !slices.ContainsFunc(cells, func(c struct {
			name string
			run  func(*settings, *report) error
		}) bool {
			return c.name == name
		}) {
			return nil, fmt.Errorf("-cells: %q is not known (accepted: native, guest, memory, udpflows)", name)
		}
	}
	return s, nil
}

// wants says whether a measurement is to be made.
func (s *settings) wants(what string) bool { return len(s.only) == 0 || slices.Contains(s.only, what) }

func run(s *settings) error {
	// A flow is a descriptor, here as in vhostd.
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("limit of descriptors: %w", err)
	}
	limit.Cur = limit.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("limit of descriptors: %w", err)
	}
	folder, err := os.MkdirTemp("", "vhostd-usernet")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	if err := os.Chmod(folder, 0o755); err != nil { // vhostd, which is somebody else, goes through it
		return err
	}
	if err := errors.Join(os.Setenv("TMPDIR", folder), os.Setenv("VHOSTD_BINARY", s.vhostd)); err != nil {
		return err
	}
	r := newReport()
	for _, c := range cells {
		if !slices.Contains(s.cells, c.name) {
			continue
		}
		if err := c.run(s, r); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	if s.json {
		return r.writeJSON(os.Stdout)
	}
	return r.writeText(os.Stdout)
}
