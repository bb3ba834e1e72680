package edge

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/vhostd/vhostd/internal/capture"
	"github.com/vhostd/vhostd/internal/ratelimit"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/port/source"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines()))
}

func newEcho(t testing.TB, o echo.Options) port.Port {
	t.Helper()
	p, err := echo.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func newGuard(t testing.TB, s Source) *Guard {
	t.Helper()
	g, err := NewGuard(s)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func newCapture(t testing.TB) (*capture.Writer, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.pcapng")
	w, err := capture.Open(capture.Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w, path
}

// all is an edge with everything, wide open.
func all(t testing.TB) Options {
	w, _ := newCapture(t)
	w.Close() // its goroutine allocates; rings take frames until they are full all the same
	return Options{
		Guard: newGuard(t, Source{MAC: [6]byte{2, 0, 0, 0, 0, 0x0b}}), FromGuest: ratelimit.New(ratelimit.MaxRate),
		ToGuest: ratelimit.New(ratelimit.MaxRate), Capture: w,
	}
}

func TestConformance(t *testing.T) {
	t.Run("echo", func(t *testing.T) {
		porttest.Run(t, porttest.Config{
			New:     func(t testing.TB) port.Port { return Wrap(newEcho(t, echo.Options{}), all(t)) },
			Returns: bytes.Clone,
		})
	})
	t.Run("source", func(t *testing.T) {
		porttest.Run(t, porttest.Config{
			New: func(t testing.TB) port.Port {
				p, err := source.New(source.Options{Size: 64})
				if err != nil {
					t.Fatal(err)
				}
				return Wrap(p, all(t))
			},
			Generates: true,
		})
	})
}

func TestNothingToWrap(t *testing.T) {
	p := newEcho(t, echo.Options{})
	defer p.Close()
	if Wrap(p, Options{}) != p {
		t.Error("a port without an edge is wrapped")
	}
}

func TestMaySend(t *testing.T) {
	mac := [6]byte{2, 0, 0, 0, 0, 1}
	p := Wrap(newEcho(t, echo.Options{}), Options{Guard: newGuard(t, Source{MAC: mac})})
	defer p.Close()
	k := p.(port.AddressKeeper)
	if err := k.MaySend(mac); err != nil {
		t.Error(err)
	}
	if err := k.MaySend([6]byte{2}); err == nil {
		t.Error("the guest may take another address")
	}
	if err := p.(port.MTUFollower).FollowMTU(1400); err != nil {
		t.Error(err)
	}
}

func TestSourceRefused(t *testing.T) {
	for _, s := range []Source{
		{MAC: [6]byte{1}}, {Addrs: make([]netip.Prefix, 1)}, {Addrs: make([]netip.Prefix, MaxAddrs+1)},
		{Addrs: []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.1/128")}},
	} {
		if _, err := NewGuard(s); err == nil {
			t.Errorf("%+v is accepted", s)
		}
	}
}
