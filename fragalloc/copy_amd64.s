#include "go_asm.h"
#include "textflag.h"

// All six functions are the same program over registers of 16, 32 or 64 bytes.
//
// BX next CopyOp, DX operations left; of the current one: SI source,
// DI destination, CX bytes. R9 is not 0 once non-temporal stores were made; R12 is the shortest copy that is
// made with them, R13 not 0 if its first 128 bytes are stored as usual.
//
// Head and tail of a copy are moved with unaligned registers that may overlap,
// all loads of a step before its stores, so no byte outside the N is touched.
//
// SAFETY: the caller vouches for N bytes at Src and Dst. The functions have no
// frame and keep nothing in memory, so a fault at any instruction can be turned
// into a panic. R14 (g) and X15 are left alone.

#define BEGIN \
	MOVQ v_base+0(FP), BX; \
	MOVQ v_len+8(FP), DX;  \
	TESTQ DX, DX;          \
	JZ   done

#define LOADOP \
	MOVQ CopyOp_Dst(BX), DI; \
	MOVQ CopyOp_Src(BX), SI; \
	MOVQ CopyOp_N(BX), CX;   \
	ADDQ $CopyOp__size, BX

// AHEAD asks for the first line of every destination, to write it: where another processor has it, as that of a guest has its receive
// buffers, the stores would fetch one line after the other. PREFETCHW has no name in the assembler (0F 0D /1, here with DI); it never
// faults, and does nothing on processors that lack it.
#define AHEAD \
	MOVQ BX, R8;                        \
	MOVQ DX, R10;                       \
ahead:                                      \
	MOVQ CopyOp_Dst(R8), DI;            \
	BYTE $0x0F; BYTE $0x0D; BYTE $0x0F; \
	ADDQ $CopyOp__size, R8;             \
	DECQ R10;                           \
	JNZ  ahead

#define NEXT \
	DECQ DX; \
	JNZ  op

// SMALL copies fewer than 16 bytes.
#define SMALL \
small:                      \
	CMPQ CX, $8;            \
	JAE  from8;             \
	CMPQ CX, $4;            \
	JAE  from4;             \
	CMPQ CX, $2;            \
	JAE  from2;             \
	TESTQ CX, CX;           \
	JZ   next;              \
	MOVB (SI), AX;          \
	MOVB AX, (DI);          \
	JMP  next;              \
from2:                      \
	MOVW (SI), AX;          \
	MOVW -2(SI)(CX*1), R8;  \
	MOVW AX, (DI);          \
	MOVW R8, -2(DI)(CX*1);  \
	JMP  next;              \
from4:                      \
	MOVL (SI), AX;          \
	MOVL -4(SI)(CX*1), R8;  \
	MOVL AX, (DI);          \
	MOVL R8, -4(DI)(CX*1);  \
	JMP  next;              \
from8:                      \
	MOVQ (SI), AX;          \
	MOVQ -8(SI)(CX*1), R8;  \
	MOVQ AX, (DI);          \
	MOVQ R8, -8(DI)(CX*1);  \
	JMP  next

// PAIR copies W to 2*W bytes.
#define PAIR(LD, V0, V1, W) \
	LD   (SI), V0;            \
	LD   -W(SI)(CX*1), V1;    \
	LD   V0, (DI);            \
	LD   V1, -W(DI)(CX*1);    \
	JMP  next

// WIDE copies W bytes or more. Beyond 4*W it stores one register, goes on at the
// next multiple of W of the destination, and ends with the last 4*W bytes.
#define WIDE(LD, V0, V1, V2, V3, W, W2, W3, W4) \
wide:                         \
	CMPQ CX, $W2;             \
	JA   wide2;               \
	PAIR(LD, V0, V1, W);      \
wide2:                        \
	CMPQ CX, $W4;             \
	JA   wide4;               \
	LD   (SI), V0;            \
	LD   W(SI), V1;           \
	LD   -W2(SI)(CX*1), V2;   \
	LD   -W(SI)(CX*1), V3;    \
	LD   V0, (DI);            \
	LD   V1, W(DI);           \
	LD   V2, -W2(DI)(CX*1);   \
	LD   V3, -W(DI)(CX*1);    \
	JMP  next;                \
wide4:                        \
	LD   (SI), V0;            \
	LD   V0, (DI);            \
	MOVQ DI, R8;              \
	ANDQ $(W-1), R8;          \
	SUBQ $W, R8;              \
	SUBQ R8, SI;              \
	SUBQ R8, DI;              \
	ADDQ R8, CX;              \
	CMPQ CX, $W4;             \
	JBE  last;                \
loop:                         \
	LD   (SI), V0;            \
	LD   W(SI), V1;           \
	LD   W2(SI), V2;          \
	LD   W3(SI), V3;          \
	LD   V0, (DI);            \
	LD   V1, W(DI);           \
	LD   V2, W2(DI);          \
	LD   V3, W3(DI);          \
	ADDQ $W4, SI;             \
	ADDQ $W4, DI;             \
	SUBQ $W4, CX;             \
	CMPQ CX, $W4;             \
	JA   loop;                \
last:                         \
	LD   -W4(SI)(CX*1), V0;   \
	LD   -W3(SI)(CX*1), V1;   \
	LD   -W2(SI)(CX*1), V2;   \
	LD   -W(SI)(CX*1), V3;    \
	LD   V0, -W4(DI)(CX*1);   \
	LD   V1, -W3(DI)(CX*1);   \
	LD   V2, -W2(DI)(CX*1);   \
	LD   V3, -W(DI)(CX*1);    \
	JMP  next

#define WIDE_SSE2 WIDE(MOVOU, X0, X1, X2, X3, 16, 32, 48, 64)
#define WIDE_AVX2 WIDE(VMOVDQU, Y0, Y1, Y2, Y3, 32, 64, 96, 128)
#define WIDE_AVX512 WIDE(VMOVDQU64, Z0, Z1, Z2, Z3, 64, 128, 192, 256)

// LINE copies 64 bytes from S to D with the store instruction ST.
#define LINE_SSE2(ST, S, D) \
	MOVOU (S), X0;   \
	MOVOU 16(S), X1; \
	MOVOU 32(S), X2; \
	MOVOU 48(S), X3; \
	ST X0, (D);      \
	ST X1, 16(D);    \
	ST X2, 32(D);    \
	ST X3, 48(D)

#define LINE_AVX2(ST, S, D) \
	VMOVDQU (S), Y0;   \
	VMOVDQU 32(S), Y1; \
	ST Y0, (D);        \
	ST Y1, 32(D)

#define LINE_AVX512(ST, S, D) \
	VMOVDQU64 (S), Z0; \
	ST Z0, (D)

// BEGINNOCACHE takes the arguments that only these functions have.
#define BEGINNOCACHE \
	XORQ R9, R9;          \
	MOVQ min+24(FP), R12; \
	MOVQ head+32(FP), R13

// NOCACHE copies 256 bytes or more: 128 to 191 bytes up to a line of the destination as usual, or, without
// a head, only up to the first line; whole lines past the cache; and leaves fewer than 64 bytes to the code at rest.
#define NOCACHE(LINE, ST, NT) \
nocache:                      \
	MOVQ $1, R9;              \
	MOVQ DI, R8;              \
	NEGQ R8;                  \
	ANDQ $63, R8;             \
	TESTQ R13, R13;           \
	JZ   nohead;              \
	LINE(ST, SI, DI);         \
	LEAQ 64(SI), R10;         \
	LEAQ 64(DI), R11;         \
	LINE(ST, R10, R11);       \
	ADDQ $128, R8;            \
	ADDQ R8, SI;              \
	ADDQ R8, DI;              \
	SUBQ R8, CX;              \
	LEAQ -64(SI), R10;        \
	LEAQ -64(DI), R11;        \
	LINE(ST, R10, R11);       \
	JMP  lines;               \
nohead:                       \
	TESTQ R8, R8;             \
	JZ   lines;               \
	LINE(ST, SI, DI);         \
	ADDQ R8, SI;              \
	ADDQ R8, DI;              \
	SUBQ R8, CX;              \
lines:                        \
	LINE(NT, SI, DI);         \
	ADDQ $64, SI;             \
	ADDQ $64, DI;             \
	SUBQ $64, CX;             \
	CMPQ CX, $64;             \
	JAE  lines;               \
	JMP  rest

// FENCE orders non-temporal stores before all later stores.
// ORDER: the copied bytes before the store that publishes them, which is the caller's.
#define FENCE \
	TESTQ R9, R9; \
	JZ   done;    \
	SFENCE

// func copyVecSSE2(v []CopyOp)
TEXT ·copyVecSSE2(SB), NOSPLIT, $0-24
	BEGIN
	AHEAD
op:
	LOADOP
	CMPQ CX, $16
	JAE  wide
	SMALL
	WIDE_SSE2
next:
	NEXT
done:
	RET

// func copyVecAVX2(v []CopyOp)
TEXT ·copyVecAVX2(SB), NOSPLIT, $0-24
	BEGIN
	AHEAD
op:
	LOADOP
	CMPQ CX, $32
	JAE  wide
	CMPQ CX, $16
	JB   small
	PAIR(VMOVDQU, X0, X1, 16)
	SMALL
	WIDE_AVX2
next:
	NEXT
	VZEROUPPER
done:
	RET

// func copyVecAVX512(v []CopyOp)
TEXT ·copyVecAVX512(SB), NOSPLIT, $0-24
	BEGIN
	AHEAD
op:
	LOADOP
	CMPQ CX, $64
	JAE  wide
	CMPQ CX, $32
	JAE  from32
	CMPQ CX, $16
	JB   small
	PAIR(VMOVDQU, X0, X1, 16)
from32:
	PAIR(VMOVDQU, Y0, Y1, 32)
	SMALL
	WIDE_AVX512
next:
	NEXT
	VZEROUPPER
done:
	RET

// func copyVecNoCacheSSE2(v []CopyOp, min, head uint64)
TEXT ·copyVecNoCacheSSE2(SB), NOSPLIT, $0-40
	BEGINNOCACHE
	BEGIN
op:
	LOADOP
	CMPQ CX, R12
	JAE  nocache
rest:
	CMPQ CX, $16
	JAE  wide
	SMALL
	WIDE_SSE2
	NOCACHE(LINE_SSE2, MOVOU, MOVNTO)
next:
	NEXT
	FENCE
done:
	RET

// func copyVecNoCacheAVX2(v []CopyOp, min, head uint64)
TEXT ·copyVecNoCacheAVX2(SB), NOSPLIT, $0-40
	BEGINNOCACHE
	BEGIN
op:
	LOADOP
	CMPQ CX, R12
	JAE  nocache
rest:
	CMPQ CX, $32
	JAE  wide
	CMPQ CX, $16
	JB   small
	PAIR(VMOVDQU, X0, X1, 16)
	SMALL
	WIDE_AVX2
	NOCACHE(LINE_AVX2, VMOVDQU, VMOVNTDQ)
next:
	NEXT
	VZEROUPPER
	FENCE
done:
	RET

// func copyVecNoCacheAVX512(v []CopyOp, min, head uint64)
TEXT ·copyVecNoCacheAVX512(SB), NOSPLIT, $0-40
	BEGINNOCACHE
	BEGIN
op:
	LOADOP
	CMPQ CX, R12
	JAE  nocache
rest:
	CMPQ CX, $64
	JAE  wide
	CMPQ CX, $32
	JAE  from32
	CMPQ CX, $16
	JB   small
	PAIR(VMOVDQU, X0, X1, 16)
from32:
	PAIR(VMOVDQU, Y0, Y1, 32)
	SMALL
	WIDE_AVX512
	NOCACHE(LINE_AVX512, VMOVDQU64, VMOVNTDQ)
next:
	NEXT
	VZEROUPPER
	FENCE
done:
	RET
