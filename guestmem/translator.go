package guestmem

// Translator stands between the addresses that descriptors carry and the memory
// table, where they are not simply guest physical addresses of memory that is
// there: behind an IOMMU, or while the memory is still on its way. Translate
// and Want are called on workers' threads, of several rings at once, and must
// not block.
type Translator interface {
	// Translate looks for addr, for a read or a write. Mapped comes with what is
	// known around addr; Missing means that the answer is not known yet, Unmapped
	// that there is nothing and will be nothing.
	Translate(addr uint64, write bool) (Mapping, Outcome)
	// Want asks for n > 0 bytes at addr, whose first byte was Missing; when they
	// come, whoever brings them has the rings try again. now says that addr came
	// in the meantime, so that the caller tries again by itself.
	Want(addr, n uint64, write bool) (now bool)
}

// Mapping is a stretch of addresses that are contiguous in this process too. It
// is valid until the translator's owner makes the rings forget it.
type Mapping struct {
	Addr, Size uint64
	Host       uintptr
}

// Outcome is what a look-up in a Translator ended with.
type Outcome uint8

// The outcomes.
const (
	Unmapped Outcome = iota
	Missing
	Mapped
)

// Remember makes m what Hit knows.
func (c *Cursor) Remember(m Mapping) { c.gpa, c.size, c.host = m.Addr, m.Size, m.Host }
