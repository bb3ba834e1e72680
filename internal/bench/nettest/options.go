package nettest

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vhostd/vhostd/internal/config"
)

// What is at the other end.
const (
	Pair    = "pair"
	Sock    = "sock"
	Tap     = "tap"
	Reflect = "reflect"
)

// Bounds of options.
const (
	MinFrame  = 60
	MaxFrame  = 65535
	MaxRing   = 32768
	MaxN      = 1 << 40
	maxPieces = 5 // descriptors of a chain that is not direct: header, and the frame in up to four
)

// Options of a run, as the command line spells them.
type Options struct {
	N        int    // frames a direction
	Frame    string // bytes, or imix
	Depth    int    // frames under way
	Batch    string // frames a publication: a number, random, or "" for as many as fit
	Ring     string // split, packed
	RingSize int
	Layout   string // direct, chained, indirect
	Wire     string
	Wake     string // of the back-end's workers: block, adaptive, poll
	Guest    string // of the guest's thread, likewise; "" follows Wake
	TxAlloc  string
	Copy     string
	CPUs     []int // guest's thread, then the back-end's workers
	Delayed  bool  // ask for completions' calls late
	EventIdx bool
	Indirect bool // negotiate it
	InOrder  bool
	Mrg      bool
	Reset    int // frames after which rings are stopped and started; 0: never
	Seed     uint64

	Program   string // of the daemon; "" for this one
	InProcess bool
	Socket    string // of a back-end that runs already and returns frames; "" for a daemon of our own
}

// Defaults are those of the kernel's test as far as it has the option.
func Defaults() Options {
	return Options{N: 1 << 20, Frame: "256", Depth: 1, Ring: "split", RingSize: 256, Layout: "direct", Wire: Sock, Wake: "block", TxAlloc: "frag",
		Copy: "auto", EventIdx: true, Indirect: true, Seed: 1}
}

// keys are the options that variants may differ in.
func (o *Options) keys() map[string]any {
	return map[string]any{
		"n": &o.N, "frame": &o.Frame, "depth": &o.Depth, "batch": &o.Batch, "ring": &o.Ring, "ring-size": &o.RingSize, "layout": &o.Layout,
		"wire": &o.Wire, "wake": &o.Wake, "guest-wake": &o.Guest, "tx-alloc": &o.TxAlloc, "copy": &o.Copy, "delayed": &o.Delayed,
		"event-idx": &o.EventIdx, "indirect": &o.Indirect, "in-order": &o.InOrder, "mrg": &o.Mrg, "reset": &o.Reset, "program": &o.Program,
	}
}

// ErrUsage marks what the user has to say otherwise.
var ErrUsage = errors.New("usage")

func usage(option, format string, args ...any) error {
	return fmt.Errorf("--%s: %s%w", option, fmt.Sprintf(format, args...), hidden{})
}

// hidden makes an error match ErrUsage without words of its own.
type hidden struct{}

func (hidden) Error() string        { return "" }
func (hidden) Is(target error) bool { return target == ErrUsage }

// Variants reads A,B of --vs. Each is KEY=VALUE, several joined by +; in B the key may be left out if A has only one.
func Variants(o Options, text string) (named [2]string, variants [2]Options, err error) {
	parts := strings.Split(text, ",")
	if len(parts) != 2 {
		return named, variants, usage("vs", "%q: accepted are two variants such as tx-alloc=refpage,tx-alloc=frag or ring=split,packed", text)
	}
	key := ""
	for i, part := range parts {
		variants[i] = o
		if i == 1 && !strings.Contains(part, "=") && key != "" {
			part = key + "=" + part
		}
		named[i] = part
		settings := strings.Split(part, "+")
		for _, s := range settings {
			name, value, ok := strings.Cut(s, "=")
			if !ok {
				return named, variants, usage("vs", "%q: accepted is KEY=VALUE", s)
			}
			if err := variants[i].set(name, value); err != nil {
				return named, variants, err
			}
			if len(settings) == 1 {
				key = name
			}
		}
		if err := variants[i].Validate(); err != nil {
			return named, variants, fmt.Errorf("--vs: %s: %w", part, err)
		}
	}
	if named[0] == named[1] {
		return named, variants, usage("vs", "%q: the variants are the same", text)
	}
	return named, variants, nil
}

func (o *Options) set(name, value string) (err error) {
	switch p := o.keys()[name].(type) {
	case *string:
		*p = value
	case *int:
		if *p, err = strconv.Atoi(value); err != nil {
			return usage("vs", "%s=%q: accepted are whole numbers", name, value)
		}
	case *bool:
		if *p, err = strconv.ParseBool(value); err != nil {
			return usage("vs", "%s=%q: accepted are true and false", name, value)
		}
	default:
		var known []string
		for k := range o.keys() {
			known = append(known, k)
		}
		slices.Sort(known)
		return usage("vs", "%q: accepted keys are %s", name, strings.Join(known, ", "))
	}
	return nil
}

func word(option, value string, accepted ...string) error {
	if slices.Contains(accepted, value) {
		return nil
	}
	return usage(option, "%q: accepted are %s", value, strings.Join(accepted, ", "))
}

func number(option string, value, low, high int) error {
	if value >= low && value <= high {
		return nil
	}
	return usage(option, "%d: accepted are %d to %d", value, low, high)
}

// Validate judges what does not need a daemon to be judged.
func (o Options) Validate() error {
	for _, err := range []error{
		number("n", o.N, 1, MaxN), o.checkFrame(), word("ring", o.Ring, "split", "packed"), o.checkRing(),
		word("layout", o.Layout, "direct", "chained", "indirect"), word("wire", o.Wire, Pair, Sock, Tap, Reflect),
		word("wake", o.Wake, "block", "adaptive", "poll"), word("guest-wake", o.Guest, "", "block", "adaptive", "poll"),
		o.checkBatch(), number("reset", o.Reset, 0, MaxN), o.checkCombination(), o.checkDaemon(),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}

func (o Options) checkFrame() error {
	if o.Frame == "imix" {
		return nil
	}
	n, err := strconv.Atoi(o.Frame)
	if err != nil || n < MinFrame || n > MaxFrame {
		return usage("frame", "%q: accepted are %d to %d bytes, or imix", o.Frame, MinFrame, MaxFrame)
	}
	return nil
}

func (o Options) checkRing() error {
	if err := number("ring-size", o.RingSize, 2, MaxRing); err != nil {
		return err
	}
	if o.Ring == "split" && bits.OnesCount(uint(o.RingSize)) != 1 {
		return usage("ring-size", "%d: a split ring has a power of two", o.RingSize)
	}
	return number("depth", o.Depth, 1, o.RingSize)
}

func (o Options) checkBatch() error {
	if o.Batch == "" || o.Batch == "random" {
		return nil
	}
	n, err := strconv.Atoi(o.Batch)
	if err != nil || n < 1 || n > o.Depth {
		return usage("batch", "%q: accepted are random and 1 to --depth, which is %d", o.Batch, o.Depth)
	}
	return nil
}

// maxTapFrame is the longest frame at the largest MTU of a tap.
const maxTapFrame = config.MaxMTU + 14

func (o Options) checkCombination() error {
	switch {
	case o.Layout == "indirect" && !o.Indirect:
		return usage("layout", "indirect needs the feature that --no-indirect leaves out")
	case o.Layout != "direct" && o.RingSize < maxPieces:
		return usage("ring-size", "%d: chains need %d descriptors", o.RingSize, maxPieces)
	case o.Wire == Tap && o.longest() > maxTapFrame:
		return usage("frame", "%s: a tap carries up to %d", o.Frame, maxTapFrame)
	case o.Socket != "" && o.InProcess:
		return usage("socket", "a back-end that runs already is not in this process")
	case o.Wire == Tap && os.Geteuid() != 0 && o.Socket == "":
		return usage("wire", "tap needs root, for a network namespace of its own")
	}
	return nil
}

// sizes are the lengths of the frames that take turns. imix is the simple mix of the Internet: seven of 40 bytes of IP, four of 576
// and one of 1500, as Ethernet frames.
func (o Options) sizes() []int {
	if o.Frame == "imix" {
		return []int{60, 590, 60, 60, 590, 60, 1514, 60, 590, 60, 60, 590}
	}
	n, _ := strconv.Atoi(o.Frame)
	return []int{n}
}

func (o Options) longest() int { return slices.Max(o.sizes()) }

// guestWake is how the guest's thread waits.
func (o Options) guestWake() string {
	if o.Guest != "" {
		return o.Guest
	}
	return o.Wake
}

// String is the run in one line, without what is default.
func (o Options) String() string {
	d := Defaults()
	mine, theirs := o.keys(), d.keys()
	list := []string{fmt.Sprintf("wire=%s ring=%s depth=%d frame=%s wake=%s n=%d", o.Wire, o.Ring, o.Depth, o.Frame, o.Wake, o.N)}
	if o.Socket != "" {
		list[0] = strings.Replace(list[0], "wire="+o.Wire, "socket="+o.Socket, 1)
	}
	for _, key := range []string{"batch", "ring-size", "layout", "guest-wake", "tx-alloc", "copy", "delayed", "event-idx", "indirect", "in-order",
		"mrg", "reset", "program"} {
		if m, t := show(mine[key]), show(theirs[key]); m != t {
			list = append(list, key+"="+m)
		}
	}
	return strings.Join(list, " ")
}

func show(p any) string {
	switch p := p.(type) {
	case *string:
		return *p
	case *int:
		return strconv.Itoa(*p)
	case *bool:
		return strconv.FormatBool(*p)
	}
	return ""
}
