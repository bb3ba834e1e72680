package guestmem

import "unsafe"

// set sets the bits of pages first to last, last < pages. Words are ORed: other
// threads set bits of the same bytes and the front-end clears them.
func (l *Log) set(first, last uint64) {
	const wordBits = 32
	words, skew := l.host&^3, uint64(l.host&3)*8
	for at := first + skew; at <= last+skew; {
		bit := at % wordBits
		n := min(wordBits-bit, last+skew-at+1)
		mask := uint32((uint64(1)<<n - 1) << bit)
		word := words + uintptr(at/wordBits*4)
		// SAFETY: bits up to last lie inside the bitmap, which is mapped; the word
		// around them is 4-aligned and so inside the same page. Bits before or behind
		// the bitmap are ORed with 0.
		// ORDER: a locked OR, after the stores into the page that it stands for; pairs
		// with the front-end's exchange of the word before it reads the page.
		or32(*(**uint32)(unsafe.Pointer(&word)), mask)
		at += n
	}
}
