package testmain

import (
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestFilesSeesAnOpenFile(t *testing.T) {
	leak := Files()
	file, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	if err := leak(); err == nil || !strings.Contains(err.Error(), "/dev/null") {
		t.Fatalf("open file not reported: %v", err)
	}
	file.Close()
	if err := leak(); err != nil {
		t.Fatalf("closed file reported: %v", err)
	}
}

func TestMappingsSeesAMapping(t *testing.T) {
	const name = "memfd:testmain-leak"
	leak := Mappings(name)
	fd, err := unix.MemfdCreate("testmain-leak", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	memory, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if err := leak(); err == nil {
		t.Fatal("mapping not reported")
	}
	if err := unix.Munmap(memory); err != nil {
		t.Fatal(err)
	}
	if err := leak(); err != nil {
		t.Fatalf("unmapped memory reported: %v", err)
	}
}

func TestGoroutinesSeesAGoroutine(t *testing.T) {
	leak := Goroutines()
	stop := make(chan struct{})
	go func() { <-stop }()
	if err := leak(); err == nil {
		t.Fatal("running goroutine not reported")
	}
	close(stop)
	if err := poll(leak); err != nil {
		t.Fatalf("ended goroutine reported: %v", err)
	}
}

func TestSkipFailsInCI(t *testing.T) {
	t.Setenv("CI", "")
	t.Setenv("VHOSTD_NO_SKIP", "")
	if NoSkip() {
		t.Fatal("skips are failures outside CI")
	}
	t.Setenv("CI", "true")
	if !NoSkip() {
		t.Fatal("skips are allowed in CI")
	}
}

func TestPollGivesTime(t *testing.T) {
	start := time.Now()
	leak := func() error {
		if time.Since(start) < 50*time.Millisecond {
			return os.ErrExist
		}
		return nil
	}
	if err := poll(leak); err != nil {
		t.Fatal(err)
	}
}
