//go:build race

package sandbox

import "golang.org/x/sys/unix"

// detectorCalls are those of the race detector when it reports: the time (OutputReport, compiler-rt/lib/tsan/rtl/tsan_rtl_report.cpp) and
// whether standard error is a terminal (SupportsColoredOutput, sanitizer_common/sanitizer_posix.cpp). Without them Trap ends the
// program before the report is out.
var detectorCalls = append(anyArguments(unix.SYS_GETTIMEOFDAY), requests(unix.TCGETS)...)
