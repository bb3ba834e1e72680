//go:build race

#include "textflag.h"

// func or32(word *uint32, mask uint32)
// SAFETY: the caller gives 4 bytes of a mapping, 4-aligned.
// ORDER: a locked instruction is a full barrier.
TEXT ·or32(SB), NOSPLIT, $0-12
	MOVQ word+0(FP), AX
	MOVL mask+8(FP), CX
	LOCK
	ORL  CX, (AX)
	RET
