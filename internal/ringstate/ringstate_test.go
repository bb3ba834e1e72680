package ringstate

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vm0.rings"), testmain.Mappings("vhostd-rings")))
}

func open(t *testing.T, dir string) (s *Store, damage error) {
	t.Helper()
	s, damage, err := Open(dir, "vm0")
	if err != nil {
		t.Fatal(err)
	}
	return s, damage
}

func closeStore(t *testing.T, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// start wants to know whether the words are those of before, which begin with mark, and marks them.
func start(t *testing.T, s *Store, i int, id Identity, n int, mark uint64) bool {
	t.Helper()
	w, same, err := s.Start(i, id, n)
	if err != nil || len(w) != n {
		t.Fatalf("%d words, %v", len(w), err)
	}
	if same && w[0] != mark || !same && w[0] != 0 {
		t.Errorf("the words begin with %d (same: %v)", w[0], same)
	}
	w[0], w[n-1] = mark, mark
	return same
}

func TestWordsOutliveTheStore(t *testing.T) {
	dir := t.TempDir()
	id, other := Identity{1, 2, 3}, Identity{1, 2, 4}
	for i, step := range []struct {
		id   Identity
		n    int
		stop bool
		same bool
	}{
		{id, 257, false, false}, {id, 257, false, true}, {other, 257, false, false}, {id, 257, false, false},
		{id, 101, false, false}, {id, 101, true, true}, {id, 101, false, false}, {id, 101, false, true},
	} {
		s, damage := open(t, dir)
		if damage != nil {
			t.Errorf("step %d: %v", i, damage)
		}
		if same := start(t, s, 3, step.id, step.n, 7); same != step.same {
			t.Errorf("step %d: same is %v", i, same)
		}
		start(t, s, 2, Identity{uint64(i)}, MaxWords, 9) // a neighbor that fills its place
		if step.stop {
			s.Stop(3)
		}
		closeStore(t, s)
	}
	info, err := os.Stat(filepath.Join(dir, "vm0.rings"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if blocks := info.Sys().(*syscall.Stat_t).Blocks; blocks*512 > 2<<20 {
		t.Errorf("the file takes %d bytes", blocks*512)
	}
	s, _ := open(t, dir)
	if err := s.Remove(); err != nil {
		t.Error(err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("%v is left", entries)
	}
}

func TestOutOfRange(t *testing.T) {
	s, err := InMemory("vm0")
	if err != nil {
		t.Fatal(err)
	}
	defer closeStore(t, s)
	for _, c := range [][2]int{{-1, 1}, {MaxRings, 1}, {0, -1}, {0, MaxWords + 1}} {
		if _, _, err := s.Start(c[0], Identity{}, c[1]); err == nil {
			t.Errorf("ring %d with %d words", c[0], c[1])
		}
	}
	s.Stop(-1)
	s.Stop(MaxRings)
	s.Stop(5)
	start(t, s, MaxRings-1, Identity{}, MaxWords, 1)
}

// What is not a state of this user alone is left to whoever has it.
func TestDamagedFiles(t *testing.T) {
	for name, make := range map[string]func(t *testing.T, path string){
		"text": func(t *testing.T, path string) { write(t, path, []byte("hello"), 0o600) },
		"zeros of the right size": func(t *testing.T, path string) {
			write(t, path, nil, 0o600)
			if err := os.Truncate(path, fileLen); err != nil {
				t.Fatal(err)
			}
		},
		"cut short": func(t *testing.T, path string) {
			s, _ := open(t, filepath.Dir(path))
			closeStore(t, s)
			if err := os.Truncate(path, 4096); err != nil {
				t.Fatal(err)
			}
		},
		"for all to read": func(t *testing.T, path string) { write(t, path, nil, 0o644) },
		"symbolic link": func(t *testing.T, path string) {
			target := filepath.Join(t.TempDir(), "target")
			write(t, target, []byte("mine"), 0o600)
			if err := os.Symlink(target, path); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if text, err := os.ReadFile(target); string(text) != "mine" {
					t.Errorf("the link's target holds %d bytes, %v", len(text), err)
				}
			})
		},
		"hard link": func(t *testing.T, path string) {
			write(t, path, nil, 0o600)
			if err := os.Link(path, path+"2"); err != nil {
				t.Fatal(err)
			}
		},
		"pipe": func(t *testing.T, path string) {
			if err := unix.Mkfifo(path, 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"another version": func(t *testing.T, path string) {
			s, _ := open(t, filepath.Dir(path))
			words(s.memory[:16])[1] = version + 1
			closeStore(t, s)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			make(t, filepath.Join(dir, "vm0.rings"))
			s, damage := open(t, dir)
			if damage == nil {
				t.Error("no word about the damage")
			}
			start(t, s, 0, Identity{1}, 10, 1)
			closeStore(t, s)
			s, damage = open(t, dir)
			if damage != nil || !start(t, s, 0, Identity{1}, 10, 1) {
				t.Errorf("the new file is not used: %v", damage)
			}
			closeStore(t, s)
		})
	}
}

func write(t *testing.T, path string, text []byte, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, text, mode); err != nil {
		t.Fatal(err)
	}
}

// Two processes do not write into one file.
func TestFileInUse(t *testing.T) {
	dir := t.TempDir()
	first, _ := open(t, dir)
	start(t, first, 0, Identity{1}, 10, 1)
	second, damage := open(t, dir)
	if damage == nil || start(t, second, 0, Identity{1}, 10, 2) {
		t.Errorf("both have the file: %v", damage)
	}
	closeStore(t, first)
	closeStore(t, second)
}

// A memfd passes from one process to the next by its descriptor.
func TestMemfdOutlivesTheStore(t *testing.T) {
	s, err := InMemory("vm0")
	if err != nil {
		t.Fatal(err)
	}
	start(t, s, 1, Identity{1}, 10, 1)
	kept, err := unix.FcntlInt(s.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	closeStore(t, s)
	s, damage, err := FromFile(os.NewFile(uintptr(kept), "kept"), "vm0")
	if err != nil || damage != nil {
		t.Fatal(err, damage)
	}
	if !start(t, s, 1, Identity{1}, 10, 1) {
		t.Error("the words are gone")
	}
	if err := unix.Ftruncate(int(s.File().Fd()), 0); err == nil {
		t.Error("the memfd can be truncated")
	}
	closeStore(t, s)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	s, damage, err = FromFile(null, "vm0")
	if err != nil || damage == nil {
		t.Fatal(err, damage)
	}
	closeStore(t, s)
}
