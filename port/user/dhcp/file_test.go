package dhcp

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

func openFile(t *testing.T, path string) (*File, []Lease) {
	t.Helper()
	f, leases, err := OpenFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return f, leases
}

// TestNAT13_LeasesInAFile: a server that begins with the leases of the one before gives their addresses to nobody else, also if that one
// was killed. Released addresses are remembered, too.
func TestNAT13_LeasesInAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	f, leases := openFile(t, path)
	serve := func() *world4 {
		s, err := New(config4(), leases, f)
		if err != nil {
			t.Fatal(err)
		}
		w := &world4{Server: s, t: t, clock: time.Unix(1e9, 0)}
		s.now = func() time.Time { return w.clock }
		return w
	}
	w := serve()
	w.boot(station(1), dhcpv4.WithOption(dhcpv4.OptHostName("web")))
	ack := w.boot(station(2))
	release, err := dhcpv4.NewReleaseFromACK(ack)
	if err != nil {
		t.Fatal(err)
	}
	w.send(release)
	want := w.Leases()
	f.file.Close() // killed
	f, leases = openFile(t, path)
	defer f.Close()
	w = serve()
	if got := w.Leases(); len(got) != 2 || got[0].Name != "web" || !slices.EqualFunc(got, want, func(a, b Lease) bool {
		return a.Addr == b.Addr && a.MAC == b.MAC && a.State == b.State && a.Expires.Equal(b.Expires)
	}) {
		t.Errorf("leases %+v, were %+v", got, want)
	}
	if got := w.addr(station(3)); got != ip("10.0.2.17") {
		t.Errorf("a newcomer got %v", got)
	}
	// What the configuration does not want any more leaves the file as well.
	other := config4()
	other.First = ip("10.0.2.17")
	if _, err := New(other, w.Leases(), f); err != nil {
		t.Fatal(err)
	}
	if len(f.slots) != 1 {
		t.Errorf("%d leases in the file", len(f.slots))
	}
}

// TestLeaseFile fills a file to the brim, and damages it.
func TestLeaseFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	f, _ := openFile(t, path)
	addr := netip.MustParseAddr("fd00::1")
	for i := range maxSlots + 1 {
		f.Put(Lease{Addr: addr, MAC: station(1), State: Bound, Name: strings.Repeat("n", 63), Expires: time.Unix(int64(i), 0)})
		addr = addr.Next()
	}
	f.Remove(netip.MustParseAddr("fd00::1"))
	f.Remove(netip.MustParseAddr("fd00::ffff"))
	if _, _, err := OpenFile(path); err == nil || !strings.Contains(err.Error(), "another process uses it") {
		t.Errorf("opened twice: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := raw.WriteAt([]byte{1, 2, 3}, 5*slotLen+20); err != nil {
		t.Fatal(err)
	}
	raw.Close()
	f, leases := openFile(t, path)
	if len(leases) != maxSlots-2 || len(f.free) != 2 || leases[0].Addr != netip.MustParseAddr("fd00::2") || len(leases[0].Name) != 63 {
		t.Errorf("%d leases, the first %+v, and %d free slots", len(leases), leases[0], len(f.free))
	}
	f.Close()
	endless := encodeLease(Lease{Addr: addr, State: Bound, Expires: time.Unix(latest+1, 0)})
	if _, ok := decodeLease(endless[:]); ok {
		t.Error("a lease without end")
	}
	second := path + ".second"
	if err := os.Link(path, second); err != nil {
		t.Fatal(err)
	}
	if _, _, err := OpenFile(path); err == nil || !strings.Contains(err.Error(), "2 names") {
		t.Errorf("two names: %v", err)
	}
	if err := os.Remove(second); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, maxSlots*slotLen+1); err != nil {
		t.Fatal(err)
	}
	if _, _, err := OpenFile(path); err == nil || !strings.Contains(err.Error(), "files of leases have") {
		t.Errorf("another file: %v", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := OpenFile(path); err == nil || !strings.Contains(err.Error(), "0600") {
		t.Errorf("readable to all: %v", err)
	}
	link := path + ".link"
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if _, _, err := OpenFile(link); err == nil {
		t.Error("a link was followed")
	}
}

func FuzzLease(f *testing.F) {
	b := encodeLease(Lease{Addr: netip.MustParseAddr("10.0.2.15"), MAC: station(1), Name: "web", State: Bound, Expires: time.Unix(1e9, 0)})
	f.Add(b[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) != slotLen {
			return
		}
		b = bytes.Clone(b)
		binary.LittleEndian.PutUint32(b, crc32.ChecksumIEEE(b[slotState:])) // what fuzzing would never find
		if l, ok := decodeLease(b); ok {
			again := encodeLease(l)
			if m, ok := decodeLease(again[:]); !ok || m != l {
				t.Errorf("%+v became %+v", l, m)
			}
		}
	})
}
