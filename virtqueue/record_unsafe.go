package virtqueue

import (
	"unsafe"

	"github.com/vhostd/vhostd/virtqueue/internal/word"
)

// recordState is the address of a record's state, 0 for a ring without record.
type recordState struct{ words []uint64 }

func recordOf(words []uint64) recordState { return recordState{words[:1]} }

func (r recordState) kept() bool { return r.words != nil }

func (r recordState) load() state { return state(r.words[0]) }

// store replaces the state.
func (r recordState) store(s state) {
	// SAFETY: the first word of a slice that r keeps alive; 8-aligned, and not moved.
	// ORDER: release, after what the program stored before; the reader is the
	// process that comes after this one. The call keeps the compiler from merging two
	// stores of one batch.
	word.Store64Release(uintptr(unsafe.Pointer(unsafe.SliceData(r.words))), uint64(s))
}
