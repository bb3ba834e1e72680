package hostile

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// sparse are regions of a file that has no pages.
func sparse(t *testing.T, sizes ...uint64) (specs []guestmem.RegionSpec, fds []int) {
	t.Helper()
	fd, err := unix.MemfdCreate("vhost-user-frontend", unix.MFD_CLOEXEC)
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	must(t, unix.Ftruncate(fd, 1<<60))
	var at uint64
	for _, size := range sizes {
		specs = append(specs, guestmem.RegionSpec{GPA: at, UVA: at, Size: size})
		fds = append(fds, fd)
		at += size
	}
	return specs, fds
}

// TestAddressSpace: a sparse file costs its owner nothing, but its mapping takes addresses, which the program's own heap and
// the other guests need.
func TestAddressSpace(t *testing.T) {
	d := serve(t, false)
	c, err := frontend.Dial(filepath.Join(d.dir, "evil"))
	must(t, err)
	defer c.Close()
	p, err := c.GetProtocolFeatures()
	must(t, err)
	must(t, c.SetProtocolFeatures(p))
	fits := func(sizes ...uint64) bool {
		specs, fds := sparse(t, sizes...)
		err := c.DoAck(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, specs), fds...)
		return err == nil
	}
	// Eight times the largest region that there is room for.
	var sizes []uint64
	for range guestmem.MaxRegions {
		var size uint64
		for bit := uint64(1) << 46; bit >= 1<<20; bit >>= 1 {
			fits(4096) // makes room: a table is replaced after the new one is mapped
			if fits(append(sizes, size|bit)...) {
				size |= bit
			}
		}
		if size == 0 {
			break
		}
		sizes = append(sizes, size)
	}
	fits(4096)
	fits(sizes...)
	t.Logf("regions of %#x", sizes)
	_, good := d.guest("good", frontend.Options{})
	ping(t, good)
}
