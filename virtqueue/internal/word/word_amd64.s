#include "textflag.h"

// x86 orders loads with later accesses and stores with earlier ones, so plain
// moves are acquire and release; being opaque to the compiler is the rest.

// func Load16Acquire(addr uintptr) uint16
// SAFETY: the caller gives 2 bytes of a mapping, 2-aligned.
// ORDER: acquire, by x86's own rules.
TEXT ·Load16Acquire(SB), NOSPLIT, $0-10
	MOVQ    addr+0(FP), AX
	MOVWLZX (AX), AX
	MOVW    AX, ret+8(FP)
	RET

// func Store16Release(addr uintptr, v uint16)
// SAFETY: the caller gives 2 bytes of a mapping, 2-aligned.
// ORDER: release, by x86's own rules.
TEXT ·Store16Release(SB), NOSPLIT, $0-10
	MOVQ addr+0(FP), AX
	MOVW v+8(FP), CX
	MOVW CX, (AX)
	RET

// func Store64Release(addr uintptr, v uint64)
// SAFETY: the caller gives 8 bytes of a mapping, 8-aligned.
// ORDER: release, by x86's own rules.
TEXT ·Store64Release(SB), NOSPLIT, $0-16
	MOVQ addr+0(FP), AX
	MOVQ v+8(FP), CX
	MOVQ CX, (AX)
	RET

// func Fence()
// SAFETY: adding 0 to the top of the stack changes nothing.
// ORDER: a locked instruction is a full barrier, and cheaper than MFENCE.
TEXT ·Fence(SB), NOSPLIT, $0-0
	LOCK
	ADDL $0, 0(SP)
	RET
