package sandbox

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// call is a system call that is allowed if its arguments meet all conditions. Several entries of one number are alternatives.
type call struct {
	number     uint32
	conditions []condition
}

// condition wants the bits of an argument, 0 to 5, under mask to be those of value. The kernel may use fewer than the 64 bits: an equal
// wants all of them, so that a caller which sets the others is refused.
type condition struct {
	argument    int
	mask, value uint64
}

func equal(argument int, value uint64) condition  { return condition{argument, ^uint64(0), value} }
func hasAll(argument int, bits uint64) condition  { return condition{argument, bits, bits} }
func hasNone(argument int, bits uint64) condition { return condition{argument, bits, 0} }

// Offsets in struct seccomp_data (include/uapi/linux/seccomp.h); both architectures are little endian.
const (
	offsetNumber = 0
	offsetArch   = 4
	offsetArgs   = 16
)

// program is the filter that allows the calls, answers ENOSYS to those that are absent, and refuses all others, those of other
// architectures (32-bit programs) included.
func program(calls, absent []call, refuse uint32) []unix.SockFilter {
	p := []unix.SockFilter{
		load(offsetArch), jump(unix.BPF_JEQ, auditArch, 1, 0), ret(refuse),
		load(offsetNumber),
	}
	for _, c := range calls {
		p = append(p, block(c, unix.SECCOMP_RET_ALLOW)...)
	}
	for _, c := range absent {
		p = append(p, block(c, unix.SECCOMP_RET_ERRNO|uint32(unix.ENOSYS))...)
	}
	return append(p, ret(refuse))
}

// block returns action for the call and goes on behind itself otherwise, with the number in the accumulator as before.
func block(c call, action uint32) []unix.SockFilter {
	if len(c.conditions) == 0 {
		return []unix.SockFilter{jump(unix.BPF_JEQ, c.number, 0, 1), ret(action)}
	}
	var tests []unix.SockFilter
	for _, t := range c.conditions {
		for half := range 2 {
			offset := uint32(offsetArgs + 8*t.argument + 4*half)
			mask, value := uint32(t.mask>>(32*half)), uint32(t.value>>(32*half))
			if mask == 0 {
				continue
			}
			tests = append(tests, load(offset), and(mask), jump(unix.BPF_JEQ, value, 0, 0))
		}
	}
	size := uint8(len(tests))
	for i := range tests {
		if tests[i].Code&0x07 == unix.BPF_JMP {
			tests[i].Jf = size - uint8(i) // to the load at the end
		}
	}
	b := []unix.SockFilter{jump(unix.BPF_JEQ, c.number, 0, size+2)}
	b = append(b, tests...)
	return append(b, ret(action), load(offsetNumber))
}

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

func and(mask uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: mask}
}

func jump(test uint16, k uint32, yes, no uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | test | unix.BPF_K, K: k, Jt: yes, Jf: no}
}

func ret(action uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
}

// setFilter confines all threads to the calls that o needs. It must be the last step: nothing else here could be called after it.
//
// Without SPEC_ALLOW kernels before 5.16 turn speculative store bypass off for a process with a filter. That costs much speed and
// protects from code of others that the process runs, which there is none of.
func setFilter(o Options) error {
	refuse := unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	if o.Trap {
		refuse = unix.SECCOMP_RET_TRAP
	}
	p := program(allowed(o), absentCalls, refuse)
	var err error
	for _, flags := range []uintptr{
		unix.SECCOMP_FILTER_FLAG_LOG | unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW,
		unix.SECCOMP_FILTER_FLAG_LOG, // before Linux 4.17
		0,                            // before Linux 4.14
	} {
		if err = loadFilter(p, flags|unix.SECCOMP_FILTER_FLAG_TSYNC); !errors.Is(err, unix.EINVAL) {
			break
		}
	}
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("seccomp is %w (%v): any system call can be made", errMissing, err)
	}
	return err
}
