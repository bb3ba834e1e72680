package guestmem

import (
	"fmt"
	"sync/atomic"
)

// maxMapped is how many bytes the tables of the process may map together. The rest of the
// 128 TiB that Linux gives a process on amd64 stays for the Go runtime, which cannot do
// without.
const maxMapped = 96 << 40

// maxMappings is how many mappings they may have: Linux gives a process 65,530
// (vm.max_map_count), and the Go runtime needs some for its heap.
const maxMappings = 48_000

// mapped and mappings are what they have.
var mapped, mappings atomic.Int64

// reserve counts one mapping of a region of n bytes, at most MaxBytes. Without an error
// unreserve gives it back.
func reserve(n int64) *RegionError {
	reason := ""
	if mapped.Add(n) > maxMapped {
		reason = fmt.Sprintf("its memory is too much next to that of the other guests, all together may have %d bytes", int64(maxMapped))
	}
	if mappings.Add(1) > maxMappings {
		reason = fmt.Sprintf("it is one region too many next to those of the other guests, all together may have %d", maxMappings)
	}
	if reason == "" {
		return nil
	}
	unreserve(n)
	return &RegionError{Reason: reason}
}

func unreserve(n int64) {
	mapped.Add(-n)
	mappings.Add(-1)
}
