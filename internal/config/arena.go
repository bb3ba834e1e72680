package config

import (
	"slices"
	"strconv"
	"strings"

	"github.com/vhostd/vhostd/pagemem"
)

// ArenaHugePages are the accepted values of arena-hugepages.
func ArenaHugePages() []string {
	return []string{"off", "try", "require", "try,2M", "try,1G", "require,2M", "require,1G"}
}

// parseArena reads the keys of the memory for frames. The error is a *KeyError.
func (p Process) parseArena() (pagemem.Config, error) {
	c := pagemem.Config{Name: "vhostd"}
	var err error
	if c.Bytes, err = parseSize(p.ArenaSize); err != nil || c.Bytes < MinArena || c.Bytes > MaxArena {
		return c, keyErrorf("arena-size", "%q: accepted are sizes from 16MiB to 64GiB", p.ArenaSize)
	}
	if !slices.Contains(ArenaHugePages(), p.ArenaHugePages) {
		return c, keyErrorf("arena-hugepages", "%q: accepted are %s", p.ArenaHugePages, strings.Join(ArenaHugePages(), "; "))
	}
	mode, size, _ := strings.Cut(p.ArenaHugePages, ",")
	c.HugePages = map[string]pagemem.HugePages{"off": pagemem.HugeOff, "try": pagemem.HugeTry, "require": pagemem.HugeRequire}[mode]
	if size == "1G" {
		c.HugePageSize = 1 << 30
	}
	if p.ArenaNode != "" {
		node, err := strconv.ParseUint(p.ArenaNode, 10, 16)
		if err != nil || node > pagemem.MaxNode {
			return c, keyErrorf("arena-node", "%q: accepted are numbers of NUMA nodes, 0 to %d", p.ArenaNode, pagemem.MaxNode)
		}
		n := int(node)
		c.Node = &n
	}
	return c, nil
}
