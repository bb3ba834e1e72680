package capture

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gopacket/gopacket/pcapgo"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines()))
}

type record struct {
	info Info
	lost uint64
	data []byte
	text string
}

// read has gopacket's reader read a file.
func read(t testing.TB, path string) (list []record) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r, err := pcapgo.NewNgReader(file, pcapgo.NgReaderOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for {
		data, ci, opts, err := r.ReadPacketDataWithOptions()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatalf("record %d of %s: %v", len(list), path, err)
		}
		rec := record{info: Info{Time: ci.Timestamp, Length: ci.Length}, data: data, text: strings.Join(opts.Comments, "")}
		if opts.DropCount != nil {
			rec.lost = *opts.DropCount
		}
		rec.info.Direction = FromGuest
		if opts.Flags.Direction == pcapgo.NgEpbFlagDirectionInbound {
			rec.info.Direction = ToGuest
		}
		list = append(list, rec)
	}
}

func open(t testing.TB, opts Options) *Writer {
	t.Helper()
	if opts.Path == "" {
		opts.Path = filepath.Join(t.TempDir(), "x.pcapng")
	}
	w, err := Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// put stages a frame and fills in its bytes. It says whether there was room.
func put(r *Ring, info Info, frame []byte) bool {
	info.Length = len(frame)
	buf := r.Stage(info, len(frame))
	copy(buf, frame)
	return buf != nil
}

func TestRecords(t *testing.T) {
	w := open(t, Options{SnapLen: 100, Name: "guest-1"})
	r := w.Ring()
	now := time.Unix(1e9, 123456789)
	long := bytes.Repeat([]byte{7}, 5000)
	put(r, Info{Time: now, Direction: FromGuest}, long[:60])
	put(r, Info{Time: now, Direction: ToGuest, Mark: TCPv6Segments, Size: 1440}, long)
	put(r, Info{Time: now, Direction: ToGuest}, long[:61])
	r.Commit(2)
	r.Commit(1) // nothing is staged
	put(r, Info{Time: now.Add(time.Second), Direction: FromGuest}, long[:14])
	r.Commit(1)
	w.Close()
	list := read(t, w.opts.Path)
	want := []record{
		{Info{Time: now.UTC(), Direction: FromGuest, Length: 60}, 0, long[:60], ""},
		{Info{Time: now.UTC(), Direction: ToGuest, Length: 5000}, 0, long[:100], "to be cut into TCP segments over IPv6 of 1440 bytes"},
		{Info{Time: now.UTC().Add(time.Second), Direction: FromGuest, Length: 14}, 0, long[:14], ""},
	}
	if fmt.Sprint(list) != fmt.Sprint(want) {
		t.Errorf("got\n%v, want\n%v", list, want)
	}
	if n, lost := w.Frames(); n != 3 || lost != 0 {
		t.Errorf("%d frames, %d lost", n, lost)
	}
	if info, err := os.Stat(w.opts.Path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// TestFullRing: frames beyond the room are lost and counted, in the file as well, and a batch that did not pass counts nothing.
func TestFullRing(t *testing.T) {
	w := open(t, Options{Ring: 1})
	r := w.Ring()
	w.mu.Lock() // the goroutine cannot take anything
	frame := make([]byte, 65000)
	passed := 0
	for range 5 {
		for range 2 {
			put(r, Info{Direction: ToGuest}, frame)
		}
		r.Commit(0)
		for range 2 {
			if put(r, Info{Direction: ToGuest}, frame) {
				passed++
			}
		}
		r.Commit(2)
	}
	w.mu.Unlock()
	if passed == 0 || passed > 2 || r.Lost() != uint64(10-passed) {
		t.Errorf("%d passed, %d lost", passed, r.Lost())
	}
	for end := time.Now().Add(5 * time.Second); r.tail.Load() != r.head.Load() && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	if !put(r, Info{}, frame[:60]) {
		t.Error("an empty ring has no room")
	}
	r.Commit(1)
	r.Close()
	w.Close()
	list := read(t, w.opts.Path)
	if len(list) != passed+1 || list[passed].lost != uint64(10-passed) {
		t.Errorf("%d records, the last says %d were lost", len(list), list[len(list)-1].lost)
	}
	if n, lost := w.Frames(); n != uint64(passed+1) || lost != uint64(10-passed) {
		t.Errorf("%d frames, %d lost", n, lost)
	}
}

func TestRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.pcapng")
	if err := os.WriteFile(path+".1", bytes.Repeat([]byte("old"), 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	const rotate, n = 100_000, 700
	w := open(t, Options{Path: path, Rotate: rotate, Files: 3})
	r := w.Ring()
	frame := make([]byte, 1000)
	for i := range n {
		binary.BigEndian.PutUint32(frame, uint32(i))
		for !put(r, Info{Direction: FromGuest}, frame) {
			r.Commit(1)
		}
		r.Commit(1)
	}
	w.Close()
	seen := map[uint32]bool{}
	for i := range 3 {
		name := fileName(path, i)
		if info, _ := os.Stat(name); info.Size() > rotate {
			t.Errorf("%s has %d bytes", name, info.Size())
		}
		for _, rec := range read(t, name) {
			seen[binary.BigEndian.Uint32(rec.data)] = true
		}
	}
	// The newest are there, without a gap.
	newest := 0
	for seen[uint32(n-1-newest)] {
		newest++
	}
	if newest != len(seen) || newest < 2*rotate/1100 {
		t.Errorf("%d frames are left, the newest %d without a gap", len(seen), newest)
	}
}

// TestDiskFull uses the device that has no room.
func TestDiskFull(t *testing.T) {
	var log bytes.Buffer
	w := open(t, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	w.mu.Lock()
	w.written.file = full
	w.mu.Unlock()
	r := w.Ring()
	for range 100 {
		put(r, Info{}, make([]byte, 9000))
		r.Commit(1)
	}
	r.Close()
	w.Close()
	if n, lost := w.Frames(); lost == 0 || n+lost != 100 {
		t.Errorf("%d frames, %d lost", n, lost)
	}
	if strings.Count(log.String(), "\n") != 1 || !strings.Contains(log.String(), "no space left") {
		t.Errorf("log: %s", log.String())
	}
}

func TestRefused(t *testing.T) {
	folder := t.TempDir()
	link, pipe := filepath.Join(folder, "link"), filepath.Join(folder, "pipe")
	if err := errors.Join(os.Symlink("target", link), unix.Mkfifo(pipe, 0o600)); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	good := filepath.Join(folder, "x")
	for _, c := range []struct {
		opts  Options
		wrong string
	}{
		{Options{}, "empty"}, {Options{Path: good, SnapLen: 13}, "snaplen=13"}, {Options{Path: good, SnapLen: 1 << 20}, "snaplen"},
		{Options{Path: good, Rotate: 5}, "rotate=5"}, {Options{Path: good, Rotate: 1 << 20, Files: 1}, "1 files"},
		{Options{Path: good, Files: 101}, "101 files"}, {Options{Path: filepath.Join(folder, "no", "x")}, "no such file"},
		{Options{Path: folder}, "is a directory"}, {Options{Path: link}, "symbolic link"}, {Options{Path: pipe}, "no plain file"},
		{Options{Path: "/dev/null"}, "no plain file"},
	} {
		if _, err := Open(c.opts); err == nil || !strings.Contains(err.Error(), c.wrong) {
			t.Errorf("%+v: error %v, want one about %q", c.opts, err, c.wrong)
		}
	}
	for text, want := range map[string]int64{"0": 0, "100": 100, "64k": 65536, "100M": 100 << 20, "2G": 2 << 30} {
		if n, err := ParseSize(text); err != nil || n != want {
			t.Errorf("%s: %d, %v", text, n, err)
		}
	}
	for _, text := range []string{"", "M", "-1", "1T", "1.5M", "9999999999999999999G", "8589934592G", "1Mé"} {
		if n, err := ParseSize(text); err == nil {
			t.Errorf("%q: %d", text, n)
		}
	}
}

// TestModel stages and commits at random while the goroutine takes, and wants the file to hold what passed, in order, and the losses to
// add up.
func TestModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		folder, err := os.MkdirTemp("", "capture")
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(folder)
		w, err := Open(Options{Path: filepath.Join(folder, "x"), Ring: 1})
		if err != nil {
			rt.Fatal(err)
		}
		r := w.Ring()
		var want [][]byte
		lost, serial := 0, uint32(0)
		for range rapid.IntRange(1, 30).Draw(rt, "batches") {
			n := rapid.IntRange(1, 6).Draw(rt, "frames")
			var batch [][]byte
			for range n {
				frame := make([]byte, rapid.IntRange(14, 60000).Draw(rt, "length"))
				serial++
				binary.BigEndian.PutUint32(frame, serial)
				if !put(r, Info{}, frame) {
					frame = nil
				}
				batch = append(batch, frame)
			}
			passed := rapid.IntRange(0, n).Draw(rt, "passed")
			r.Commit(passed)
			for _, frame := range batch[:passed] {
				if frame == nil {
					lost++
				} else {
					want = append(want, frame)
				}
			}
		}
		r.Close()
		w.Close()
		list := read(t, w.opts.Path)
		if n, all := w.Frames(); len(list) != len(want) || all != uint64(lost) || n != uint64(len(want)) {
			rt.Fatalf("%d records for %d frames; %d lost, counted %d", len(list), len(want), lost, all)
		}
		told := uint64(0)
		for i, rec := range list {
			told += rec.lost
			if !bytes.Equal(rec.data, want[i]) {
				rt.Fatalf("record %d is another frame", i)
			}
		}
		if told > uint64(lost) {
			rt.Fatalf("the file tells of %d losses, %d there were", told, lost)
		}
	})
}

func TestManyRings(t *testing.T) {
	w := open(t, Options{Ring: 1})
	var wg sync.WaitGroup
	var passed [4]int
	for i := range passed {
		wg.Go(func() {
			r := w.Ring()
			defer r.Close()
			for range 300 {
				for range 8 {
					if put(r, Info{Direction: ToGuest}, make([]byte, 1000)) {
						passed[i]++
					}
				}
				r.Commit(8)
				_, _ = w.Frames()
			}
		})
	}
	wg.Wait()
	w.Close()
	n, lost := w.Frames()
	if int(n) != passed[0]+passed[1]+passed[2]+passed[3] || n+lost != 4*300*8 || len(read(t, w.opts.Path)) != int(n) {
		t.Errorf("%d written, %d lost, %v passed", n, lost, passed)
	}
}

func TestStageAllocatesNothing(t *testing.T) {
	w := open(t, Options{})
	r := w.Ring()
	frame := make([]byte, 1514)
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := testing.AllocsPerRun(100, func() {
		for range 16 {
			put(r, Info{}, frame)
		}
		r.Commit(16)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzParseSize(f *testing.F) {
	for _, text := range []string{"100M", "G", "1k", "99999999999999999999"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if n, err := ParseSize(text); err == nil && n < 0 {
			t.Errorf("%q: %d", text, n)
		}
	})
}
