package pagemem

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// HugePages says where the memory of an arena comes from.
type HugePages uint8

const (
	// HugeOff is ordinary memory, which the kernel backs with transparent huge pages where it may.
	HugeOff HugePages = iota
	// HugeTry is the kernel's pool of huge pages (hugetlb), or ordinary memory if that has not enough.
	HugeTry
	// HugeRequire is the pool; without enough pages in it there is no arena.
	HugeRequire
)

// MaxNode is the highest number of a NUMA node that a Config may name (CONFIG_NODES_SHIFT is at most 10).
const MaxNode = 1023

const (
	size2M = 2 << 20
	size1G = 1 << 30
)

// mapping is memory of an arena.
type mapping struct {
	base  uintptr
	bytes uint64
	page  uint64 // size of the huge pages, 0 for ordinary memory
	why   error  // huge pages were tried in vain
}

// mapArena maps memory of at least the configured size and, with a node, asks for it there. A pool's pages are used one line each, and
// with small pages every one of them costs a miss of the first-level TLB.
func mapArena(name string, c *Config) (m mapping, err error) {
	if c.HugePages != HugeOff {
		if m, err = mapHuge(name, c); err == nil || c.HugePages == HugeRequire {
			return m, err
		}
		m.why = err
	}
	m.bytes = roundUp(c.Bytes, ChunkSize)
	if m.base, err = mapAnonymous(name, m.bytes); err != nil || c.Node == nil {
		return m, err
	}
	// A preference: a node that is full would otherwise have processes killed, ours for one, while others have memory.
	if err := setNode(m.base, m.bytes, unix.MPOL_PREFERRED, *c.Node); err != nil {
		return m, errors.Join(nodeError(*c.Node, err), unmapArena(m.base, m.bytes))
	}
	return m, nil
}

// mapHuge maps memory of the pool and takes the pages out of it at once: a page that is missing later, because another node or
// control group has it, would end the process where it is first touched.
func mapHuge(name string, c *Config) (mapping, error) {
	m := mapping{page: c.hugePageSize()}
	m.bytes = roundUp(c.Bytes, m.page)
	var err error
	if m.base, err = mapMemfd(name, m.bytes, hugeFlag(m.page)); err != nil {
		return mapping{}, m.short(c.Node, err)
	}
	if c.Node != nil {
		if err := setNode(m.base, m.bytes, unix.MPOL_BIND, *c.Node); err != nil {
			return mapping{}, errors.Join(nodeError(*c.Node, err), unmapArena(m.base, m.bytes))
		}
	}
	// Kernels before 5.14 do not know the advice.
	if err := populate(m.base, m.bytes); err != nil && !errors.Is(err, unix.EINVAL) {
		return mapping{}, errors.Join(m.short(c.Node, err), unmapArena(m.base, m.bytes))
	}
	return m, nil
}

func hugeFlag(size uint64) int {
	if size == size1G {
		return unix.MFD_HUGETLB | unix.MFD_HUGE_1GB
	}
	return unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
}

// short explains why there are no pages, with the numbers that the kernel tells.
func (m *mapping) short(node *int, err error) error {
	pool := fmt.Sprintf("/sys/kernel/mm/hugepages/hugepages-%dkB", m.page>>10)
	if _, missing := os.Stat(pool); missing != nil {
		return fmt.Errorf("pagemem: the kernel has no huge pages of %s", sizeText(m.page))
	}
	where := ""
	if node != nil {
		pool = fmt.Sprintf("/sys/devices/system/node/node%d/hugepages/hugepages-%dkB", *node, m.page>>10)
		where = fmt.Sprintf(" on node %d", *node)
	}
	free := "an unknown number"
	if text, err := os.ReadFile(pool + "/free_hugepages"); err == nil {
		free = strings.TrimSpace(string(text))
	}
	return fmt.Errorf("pagemem: arena of %d huge pages of %s%s, free are %s (%w): reserve them in %s/nr_hugepages",
		m.bytes/m.page, sizeText(m.page), where, free, err, pool)
}

func sizeText(bytes uint64) string {
	if bytes == size1G {
		return "1 GiB"
	}
	return "2 MiB"
}

// nodeError explains a node that memory cannot be asked from.
func nodeError(node int, err error) error {
	if errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("pagemem: memory of NUMA node %d: the kernel was built without NUMA", node)
	}
	nodes := "unknown"
	if text, err := os.ReadFile("/sys/devices/system/node/has_memory"); err == nil {
		nodes = strings.TrimSpace(string(text))
	}
	return fmt.Errorf("pagemem: memory of NUMA node %d: %w; nodes with memory are %s", node, err, nodes)
}
