package uffd

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
)

const page = 1 << PageShift

// needUffd skips where postcopy cannot work.
func needUffd(t *testing.T) {
	t.Helper()
	if err := Probe(); err != nil {
		testmain.Skip(t, "postcopy does not work here: %v", err)
	}
}

func memfd(t *testing.T, pages int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("uffd-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, int64(pages*page)); err != nil {
		t.Fatal(err)
	}
	return fd
}

// rig is a helper with one registered region of a memfd.
type rig struct {
	*Helper
	t        *testing.T
	uffd     int
	file     int
	addr     uint64
	arrivals chan Arrival
}

func newRig(t *testing.T, pages int) *rig {
	t.Helper()
	needUffd(t)
	r := &rig{t: t, file: memfd(t, pages), arrivals: make(chan Arrival, 1000)}
	var err error
	if r.Helper, err = Start(func(a Arrival) { r.arrivals <- a }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	r.uffd = r.TakeFD()
	t.Cleanup(func() { unix.Close(r.uffd) })
	if r.addr, err = r.Map(7, r.file, 0, uintptr(pages*page)); err != nil {
		t.Fatal(err)
	}
	if err := r.Register(7); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) fetch(at int) {
	r.t.Helper()
	if err := r.Fetch(7, uint64(at*page), page); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) await() Arrival {
	r.t.Helper()
	select {
	case a := <-r.arrivals:
		return a
	case <-time.After(10 * time.Second):
		r.t.Fatal("nothing arrives")
		return Arrival{}
	}
}

// pid finds the helper among this process's children, and those of its launcher.
func (r *rig) pid() int {
	r.t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range entries {
		line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err != nil || string(line) != helperName+"\x00" {
			continue
		}
		maps, _ := os.ReadFile("/proc/" + e.Name() + "/maps")
		if strings.Contains(string(maps), fmt.Sprintf("%x-", r.addr)) && strings.Contains(string(maps), "memfd:uffd-test") {
			pid, _ := strconv.Atoi(e.Name())
			return pid
		}
	}
	r.t.Fatal("no helper process")
	return 0
}

func TestFetchReportsTheFaultAndArrivesWhenItIsAnswered(t *testing.T) {
	r := newRig(t, 600)
	if _, err := unix.Pwrite(r.file, []byte("here"), 3*page); err != nil {
		t.Fatal(err)
	}
	r.fetch(5)
	at, err := NextFault(r.uffd, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if want := r.addr + 5*page; at != want {
		t.Fatalf("fault at %#x, expected %#x", at, want)
	}
	select {
	case a := <-r.arrivals:
		t.Fatalf("arrived before the answer: %+v", a)
	case <-time.After(20 * time.Millisecond):
	}
	if err := Place(r.uffd, at, bytes.Repeat([]byte{9}, page)); err != nil {
		t.Fatal(err)
	}
	a := r.await()
	if a.Err != nil || a.Region != 7 || a.Offset != 5*page || a.Size != page || a.Chunk[0] != 1<<3|1<<5 {
		t.Fatalf("arrival %+v, expected page 5 of region 7, and that 3 and 5 are there", a)
	}
	var b [2]byte
	if _, err := unix.Pread(r.file, b[:], 6*page-2); err != nil || b != [2]byte{9, 9} {
		t.Fatalf("content %v, %v", b, err)
	}
	r.fetch(3) // is there: nobody is asked
	if a := r.await(); a.Err != nil || a.Offset != 3*page {
		t.Fatalf("arrival %+v", a)
	}
}

func TestLastChunkTellsTheFilesPagesOnly(t *testing.T) {
	r := newRig(t, 600)
	if _, err := unix.Pwrite(r.file, []byte("here"), 599*page); err != nil {
		t.Fatal(err)
	}
	r.fetch(599)
	if a := r.await(); a.Err != nil || a.Chunk != (Chunk{1: 1 << (599 - 512 - 64)}) {
		t.Fatalf("arrival %+v", a)
	}
}

// TestUnansweredFaultsStopNobody leaves faults open: other pages arrive, a garbage collection of this process
// ends, and so does the helper.
func TestUnansweredFaultsStopNobody(t *testing.T) {
	r := newRig(t, 100)
	if _, err := unix.Pwrite(r.file, []byte("here"), 99*page); err != nil {
		t.Fatal(err)
	}
	for i := range 64 {
		r.fetch(i)
	}
	if _, err := NextFault(r.uffd, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	r.fetch(99)
	if a := r.await(); a.Offset != 99*page {
		t.Fatalf("arrival %+v", a)
	}
	begin := time.Now()
	runtime.GC()
	r.Close()
	if took := time.Since(begin); took > 5*time.Second {
		t.Fatalf("collection and end took %v", took)
	}
	if data, err := unix.Seek(r.file, 0, unix.SEEK_DATA); err != nil || data != 99*page {
		t.Fatalf("the first page with content is at %#x (%v): the end of the helper made pages that had not arrived", data, err)
	}
}

// TestFrontEndThatTakesTheHelperOver registers the helper's own memory, which stops it at the latest when it
// touches new memory. It can be ended all the same.
func TestFrontEndThatTakesTheHelperOver(t *testing.T) {
	r := newRig(t, 8)
	if _, err := NextFault(r.uffd, time.Millisecond); err == nil {
		t.Fatal("a fault without a request")
	}
	maps, err := os.ReadFile("/proc/" + strconv.Itoa(r.pid()) + "/maps")
	if err != nil {
		testmain.Skip(t, "the helper's memory map: %v", err)
	}
	taken := 0
	for _, line := range strings.Split(string(maps), "\n") {
		var from, to uint64
		fields := strings.Fields(line)
		if len(fields) != 5 || fields[1] != "rw-p" {
			continue
		}
		span := strings.SplitN(fields[0], "-", 2)
		from, _ = strconv.ParseUint(span[0], 16, 64)
		to, _ = strconv.ParseUint(span[1], 16, 64)
		if register(r.uffd, uintptr(from), uintptr(to-from)) == nil {
			taken++
		}
	}
	if taken == 0 {
		t.Fatal("no memory of the helper could be registered: then it need not be a process of its own")
	}
	r.fetch(1)
	begin := time.Now()
	r.Close()
	if took := time.Since(begin); took > 5*time.Second {
		t.Fatalf("the end took %v", took)
	}
}

func TestHelperKilled(t *testing.T) {
	r := newRig(t, 8)
	r.fetch(1)
	if err := unix.Kill(r.pid(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-r.Done()
	if _, err := r.Map(8, r.file, 0, page); err == nil {
		t.Fatal("a helper that has ended maps memory")
	}
	r.Close()
}

func TestMapRefusesWhatCannotBeRegistered(t *testing.T) {
	r := newRig(t, 8)
	pipe := make([]int, 2)
	if err := unix.Pipe2(pipe, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	if _, err := r.Map(9, pipe[0], 0, page); err == nil {
		t.Error("a pipe was mapped")
	}
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(page); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Map(10, int(file.Fd()), 0, page); err != nil {
		t.Fatal(err)
	}
	if err := r.Register(10); err == nil {
		t.Log("a file of the temporary folder's file system can be registered: tmpfs")
	}
	if err := r.Register(11); err == nil {
		t.Error("a region that was never mapped was registered")
	}
	if _, err := r.Map(7, r.file, 0, page); err == nil {
		t.Error("a number was given twice")
	}
	if err := r.Unmap(7); err != nil {
		t.Error(err)
	}
	if _, err := r.Map(7, r.file, page, page); err != nil {
		t.Error(err)
	}
}

// TestHelperHasNoRights looks at what the kernel says of the process.
func TestHelperHasNoRights(t *testing.T) {
	testmain.NeedRoot(t)
	r := newRig(t, 1)
	status, err := os.ReadFile("/proc/" + strconv.Itoa(r.pid()) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Uid:\t65534\t65534\t65534\t65534", "Gid:\t65534\t65534\t65534\t65534", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
}

// TestLauncher starts helpers through a process that was started before, and ends them in either order.
func TestLauncher(t *testing.T) {
	stop, err := Prelaunch()
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, 4)
	pid := r.pid()
	r.fetch(2)
	if err := answerFault(r.uffd, make([]byte, page)); err != nil {
		t.Fatal(err)
	}
	if a := r.await(); a.Err != nil {
		t.Fatal(a.Err)
	}
	r.Close()
	if err := unix.Kill(pid, 0); err != unix.ESRCH {
		t.Errorf("the helper is still there: %v", err)
	}
	other := newRig(t, 4)
	stop()
	select {
	case <-other.Done():
	case <-time.After(5 * time.Second):
		t.Error("the helper outlives its launcher")
	}
	again, err := Start(func(Arrival) {})
	if err != nil {
		t.Fatalf("without a launcher: %v", err)
	}
	again.Close()
}

// TestHugePages brings a page of hugetlbfs, which is one piece.
func TestHugePages(t *testing.T) {
	needUffd(t)
	testmain.Hugepages(t, 2)
	const huge = 2 << 20
	fd, err := unix.MemfdCreate("uffd-huge", unix.MFD_CLOEXEC|unix.MFD_HUGETLB)
	if err != nil {
		testmain.Skip(t, "huge memfd: %v", err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 2*huge); err != nil {
		t.Fatal(err)
	}
	arrivals := make(chan Arrival, 1)
	h, err := Start(func(a Arrival) { arrivals <- a })
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	uffd := h.TakeFD()
	defer unix.Close(uffd)
	addr, err := h.Map(1, fd, 0, 2*huge)
	if err == nil {
		err = h.Register(1)
	}
	if err == nil {
		err = h.Fetch(1, huge, huge)
	}
	if err != nil {
		t.Fatal(err)
	}
	at, err := NextFault(uffd, 10*time.Second)
	if err != nil || at != addr+huge {
		t.Fatalf("fault at %#x, expected %#x; %v", at, addr+huge, err)
	}
	if err := Place(uffd, at, bytes.Repeat([]byte{7}, huge)); err != nil {
		t.Fatal(err)
	}
	a := <-arrivals
	if a.Err != nil || a.Offset != huge || a.Size != huge || a.Chunk != (Chunk{}) {
		t.Fatalf("arrival %+v", a)
	}
}
