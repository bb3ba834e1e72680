package attach

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
)

// reason is why a frame disappeared.
type reason int

const (
	tooShort     reason = iota // of the tap or the back-end: no Ethernet header
	tooLong                    // of the tap: longer than virtio.MaxFrame
	badHeader                  // of the back-end: a virtio header that was not negotiated or contradicts the frame
	badMerge                   // of the back-end: a frame in a number of buffers that cannot be
	interfaceOff               // towards the namespace: the interface is down
	noBuffers                  // towards the namespace: the kernel has no memory for it now
	writeError                 // towards the namespace: the kernel refused it
	readError                  // of the tap
	underWay                   // in rings whose back-end went away
	numReasons
)

var reasonNames = [numReasons]string{"too_short", "too_long", "bad_header", "bad_merge", "interface_down", "no_buffers",
	"write_error", "read_error", "under_way"}

// direction counts the frames of one direction. One worker adds, anybody reads.
type direction struct {
	frames, bytes, kicks, calls atomic.Uint64
	drops                       [numReasons]atomic.Uint64
}

func (d *direction) drop(r reason) { d.drops[r].Add(1) }

// traffic are the counters of a queue pair, which outlive connections.
type traffic struct{ sent, received direction }

// Counters are the sums over all queue pairs and connections.
type Counters struct {
	// Sent is from the namespace to the back-end, Received the other way.
	Sent     Direction `json:"sent"`
	Received Direction `json:"received"`
	// Connections is how often the back-end was connected to.
	Connections uint64 `json:"connections"`
}

// Direction are the counters of one direction: frames and their bytes, the kicks given and the calls taken for them, and frames
// that disappeared, by reason.
type Direction struct {
	Frames  uint64            `json:"frames"`
	Bytes   uint64            `json:"bytes"`
	Kicks   uint64            `json:"kicks"`
	Calls   uint64            `json:"calls"`
	Dropped map[string]uint64 `json:"dropped"`
}

func (d *direction) addTo(sum *Direction) {
	sum.Frames += d.frames.Load()
	sum.Bytes += d.bytes.Load()
	sum.Kicks += d.kicks.Load()
	sum.Calls += d.calls.Load()
	if sum.Dropped == nil {
		sum.Dropped = map[string]uint64{}
	}
	for r := range d.drops {
		if n := d.drops[r].Load(); n > 0 {
			sum.Dropped[reasonNames[r]] += n
		}
	}
}

// String is the form for people.
func (c Counters) String() string {
	return fmt.Sprintf("sent %v; received %v; %d connections", c.Sent, c.Received, c.Connections)
}

func (d Direction) String() string {
	text := fmt.Sprintf("%d frames, %d bytes, %d kicks, %d calls", d.Frames, d.Bytes, d.Kicks, d.Calls)
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(d.Dropped)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, d.Dropped[name]))
	}
	if len(parts) > 0 {
		text += ", dropped: " + strings.Join(parts, ", ")
	}
	return text
}
