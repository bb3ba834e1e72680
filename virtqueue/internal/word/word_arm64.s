#include "textflag.h"

// func Load16Acquire(addr uintptr) uint16
// SAFETY: the caller gives 2 bytes of a mapping, 2-aligned as LDARH demands.
// ORDER: acquire.
TEXT ·Load16Acquire(SB), NOSPLIT, $0-10
	MOVD  addr+0(FP), R0
	LDARH (R0), R1
	MOVH  R1, ret+8(FP)
	RET

// func Store16Release(addr uintptr, v uint16)
// SAFETY: the caller gives 2 bytes of a mapping, 2-aligned as STLRH demands.
// ORDER: release.
TEXT ·Store16Release(SB), NOSPLIT, $0-10
	MOVD  addr+0(FP), R0
	MOVHU v+8(FP), R1
	STLRH R1, (R0)
	RET

// func Store64Release(addr uintptr, v uint64)
// SAFETY: the caller gives 8 bytes of a mapping, 8-aligned as STLR demands.
// ORDER: release.
TEXT ·Store64Release(SB), NOSPLIT, $0-16
	MOVD addr+0(FP), R0
	MOVD v+8(FP), R1
	STLR R1, (R0)
	RET

// func Fence()
// ORDER: full barrier in the inner shareable domain.
TEXT ·Fence(SB), NOSPLIT, $0-0
	DMB $0xb
	RET
