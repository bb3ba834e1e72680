package vhostuser_test

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
)

// mappings counts the process's mappings of memfds.
func mappings(t *testing.T) int { return countMaps(t, "memfd:") }

func countMaps(t *testing.T, name string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b, []byte(name))
}

func TestHostileC16toC26_BadTables(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20, 1<<20)
	b.shareMemory(mem)
	fds, maps := openFDs(), mappings(t)
	good, files := mem.Table()
	pipe := make([]int, 2)
	b.must(unix.Pipe2(pipe, unix.O_CLOEXEC))
	dir, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	b.must(err)
	for name, tt := range map[string]struct {
		edit  func(r []guestmem.RegionSpec)
		files []int
	}{
		"size 0":              {edit: func(r []guestmem.RegionSpec) { r[1].Size = 0 }},
		"guest address wraps": {edit: func(r []guestmem.RegionSpec) { r[1].GPA = ^uint64(0xfff) }},
		"front-end wraps":     {edit: func(r []guestmem.RegionSpec) { r[1].UVA = ^uint64(0xfff) }},
		"guest overlap":       {edit: func(r []guestmem.RegionSpec) { r[1].GPA = r[0].GPA + 0x1000 }},
		"front-end overlap":   {edit: func(r []guestmem.RegionSpec) { r[1].UVA = r[0].UVA }},
		"beyond the file":     {edit: func(r []guestmem.RegionSpec) { r[1].MmapOffset = 0x1000 }},
		"offset wraps":        {edit: func(r []guestmem.RegionSpec) { r[1].MmapOffset = ^uint64(0xfff) }},
		"pipe":                {files: []int{files[0], pipe[0]}},
		"directory":           {files: []int{files[0], dir}},
		"one file too few":    {files: files[:1]},
		"one file too many":   {files: append(files[:2:2], files[0])},
		"no files":            {files: []int{}},
	} {
		specs := append([]guestmem.RegionSpec(nil), good...)
		if tt.edit != nil {
			tt.edit(specs)
		}
		if tt.files == nil {
			tt.files = files
		}
		if err := b.SetMemTable(specs, tt.files); !isRefused(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, payload := range [][]byte{
		make([]byte, 8), // no region
		vhostuser.AppendMemTable(nil, good)[:8+32],              // fewer than announced
		append([]byte{255, 255, 255, 255}, make([]byte, 36)...), // announces 2^32-1
		append(make([]byte, 8), make([]byte, 9*32)...),          // nine regions
	} {
		if err := b.DoAck(vhostuser.ReqSetMemTable, payload, files...); !isRefused(err) {
			t.Errorf("payload of %d bytes: %v", len(payload), err)
		}
	}
	unix.Close(pipe[0])
	unix.Close(pipe[1])
	unix.Close(dir)
	if n := openFDs(); n > fds {
		t.Errorf("%d descriptors open, %d before", n, fds)
	}
	if n := mappings(t); n > maps {
		t.Errorf("%d mappings, %d before", n, maps)
	}
	if got := b.session.State().Regions; got != 2 {
		t.Errorf("%d regions, the old table has 2", got)
	}
	b.checkDevice()
}

// TestMEM01_TableUnderRunningRings swaps the table in every way that a front-end
// has, and takes the rings' region away and back.
func TestMEM01_C32_TableUnderRunningRings(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	rings, other := newMemory(t, 1<<20), newMemory(t, 1<<20)
	other.Regions[0].GPA += 1 << 32
	other.Regions[0].UVA += 1 << 36
	share := func(regions ...*struct {
		guestmem.RegionSpec
		fd int
	}) {
		var specs []guestmem.RegionSpec
		var fds []int
		for _, r := range regions {
			specs, fds = append(specs, r.RegionSpec), append(fds, r.fd)
		}
		b.must(b.SetMemTable(specs, fds))
	}
	type region = struct {
		guestmem.RegionSpec
		fd int
	}
	r0 := &region{rings.Regions[0].RegionSpec, rings.Regions[0].FD}
	r1 := &region{other.Regions[0].RegionSpec, other.Regions[0].FD}
	share(r0)
	b.startRing(rings, 0, 3)
	b.startRing(rings, 1, 4)
	fds, maps := openFDs(), mappings(t)
	parked := func(want bool) {
		t.Helper()
		b.dev.peek(func(d *fakeDevice) {
			if len(d.running) != 2 || d.parked[0] != want || d.parked[1] != want {
				t.Errorf("running %v, parked %v, want parked %v", len(d.running), d.parked, want)
			}
		})
	}
	for range 50 {
		share(r0)
		share(r0, r1)
		share(r1, r0)
		parked(false)
		share(r1)
		parked(true)
		share(r0)
		parked(false)
	}
	b.dev.peek(func(d *fakeDevice) {
		if len(d.starts) != 2 || d.swaps < 250 {
			t.Errorf("starts %v, %d swaps", d.starts, d.swaps)
		}
	})
	if n := b.logs.lines(); n != 1 || !strings.Contains(b.logs.String(), "until its memory returns") {
		t.Errorf("want one line about parked rings, got %s", b.logs)
	}
	if n, m := openFDs(), mappings(t); n > fds || m > maps {
		t.Errorf("%d descriptors and %d mappings, %d and %d before", n, m, fds, maps)
	}
	b.checkDevice()
}

// TestHostileA8_OtherTableBeforeRestart: addresses are translated again at each
// start, and never reach into a table that is gone.
func TestHostileA8_OtherTableBeforeRestart(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	first, second := newMemory(t, 1<<20), newMemory(t, 1<<20)
	b.shareMemory(first)
	b.startRing(first, 0, 0)
	_, err := b.GetVringBase(0)
	b.must(err)

	second.Regions[0].UVA += 1 << 40
	b.shareMemory(second)
	if err := b.SetVringKick(0, eventFD(t)); !isRefused(err) {
		t.Errorf("start outside the new table: %v", err)
	}
	second.Regions[0].UVA -= 1 << 40
	b.shareMemory(second)
	b.must(b.SetVringKick(0, eventFD(t)))
	b.checkDevice()
	if !b.dev.isRunning(0) {
		t.Error("ring 0 does not run")
	}
}

func TestMEM11_TablesPileUp(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	fds, maps := openFDs(), mappings(t)
	for range 500 {
		mem := newMemory(t, 1<<16)
		b.shareMemory(mem)
		mem.Close()
	}
	if n, m := openFDs(), mappings(t); n > fds || m > maps+1 {
		t.Errorf("%d descriptors and %d mappings, %d and %d before", n, m, fds, maps)
	}
}

func TestDeviceRefusesMemory(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	maps := mappings(t)
	b.dev.peek(func(d *fakeDevice) { d.refuseMemory = os.ErrInvalid })
	specs, fds := mem.Table()
	if err := b.SetMemTable(specs, fds); !isRefused(err) {
		t.Errorf("table that the device refuses: %v", err)
	}
	b.dev.peek(func(d *fakeDevice) { d.refuseMemory = nil })
	if m := mappings(t); m != maps || !b.dev.isRunning(0) {
		t.Errorf("%d mappings, %d before; ring 0 running %v", m, maps, b.dev.isRunning(0))
	}
	b.checkDevice()
}
