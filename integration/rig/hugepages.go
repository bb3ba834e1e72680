package rig

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const hugepageCount = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"

// Hugepages are 2 MiB pages reserved for DPDK, with a hugetlbfs mount of their own.
type Hugepages struct {
	Folder string
	added  int
}

// ReserveHugepages raises the number of 2 MiB pages by n and mounts a hugetlbfs below folder.
func ReserveHugepages(folder string, n int) (*Hugepages, error) {
	before, err := readNumber(hugepageCount)
	if err != nil {
		return nil, fmt.Errorf("hugepages: %w", err)
	}
	h := &Hugepages{Folder: filepath.Join(folder, "hugepages"), added: n}
	if err := writeNumber(hugepageCount, before+n); err != nil {
		return nil, fmt.Errorf("reserve %d hugepages: %w", n, err)
	}
	if now, err := readNumber(hugepageCount); err != nil || now < before+n {
		_ = writeNumber(hugepageCount, before)
		return nil, fmt.Errorf("reserve %d hugepages: the kernel gave %d (%v); memory is short or fragmented", n, now-before, err)
	}
	if err := os.MkdirAll(h.Folder, 0o755); err != nil {
		return nil, err
	}
	if err := syscall.Mount("none", h.Folder, "hugetlbfs", 0, "pagesize=2M"); err != nil {
		_ = writeNumber(hugepageCount, before)
		return nil, fmt.Errorf("mount hugetlbfs: %w", err)
	}
	return h, nil
}

// Free is the number of 2 MiB pages that nobody uses.
func (h *Hugepages) Free() (int, error) {
	return readNumber(filepath.Join(filepath.Dir(hugepageCount), "free_hugepages"))
}

// WaitFree waits until that many pages are free.
func (h *Hugepages) WaitFree(want int, timeout time.Duration) error {
	for end := time.Now().Add(timeout); ; time.Sleep(20 * time.Millisecond) {
		free, err := h.Free()
		if err != nil || free >= want {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d hugepages free %v after the end, expected %d", free, timeout, want)
		}
	}
}

// Clear removes the files of front-ends that have ended: DPDK's single-file segments outlive it.
func (h *Hugepages) Clear() error {
	files, err := filepath.Glob(filepath.Join(h.Folder, "*"))
	if err != nil {
		return err
	}
	for _, path := range files {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	return nil
}

// Close unmounts and gives the pages back.
func (h *Hugepages) Close() error {
	if err := syscall.Unmount(h.Folder, 0); err != nil {
		return fmt.Errorf("unmount hugetlbfs: %w", err)
	}
	// Others may have reserved pages meanwhile, so this takes back what it gave and no more.
	now, err := readNumber(hugepageCount)
	if err != nil {
		return err
	}
	return writeNumber(hugepageCount, max(now-h.added, 0))
}

func readNumber(path string) (int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

func writeNumber(path string, n int) error {
	return os.WriteFile(path, []byte(strconv.Itoa(n)), 0)
}
