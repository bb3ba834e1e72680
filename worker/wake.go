package worker

import "fmt"

// Wake says how a loop waits for work.
type Wake uint8

// Block sleeps as soon as nothing is pending, Adaptive polls for the spin time
// before it sleeps, Poll never sleeps and never asks for notifications.
const (
	Block Wake = iota
	Adaptive
	Poll
)

var wakeNames = [...]string{Block: "block", Adaptive: "adaptive", Poll: "poll"}

// String returns the name that [ParseWake] accepts.
func (w Wake) String() string {
	if int(w) < len(wakeNames) {
		return wakeNames[w]
	}
	return fmt.Sprintf("Wake(%d)", uint8(w))
}

// ParseWake turns "block", "adaptive" or "poll" into a Wake.
func ParseWake(s string) (Wake, error) {
	for w, name := range wakeNames {
		if s == name {
			return Wake(w), nil
		}
	}
	return Block, fmt.Errorf("wake mode %q: accepted are block, adaptive and poll", s)
}
