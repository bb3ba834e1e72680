package user

import (
	"log/slog"
	"testing"

	"gvisor.dev/gvisor/pkg/buffer"

	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

var quiet = slog.New(slog.DiscardHandler)

func newPort(t testing.TB, opts Options) *Port {
	t.Helper()
	if opts.Logger == nil {
		opts.Logger = quiet
	}
	p, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestConformance(t *testing.T) {
	porttest.Run(t, porttest.Config{
		New: func(t testing.TB) port.Port {
			p, err := New(Options{Logger: quiet})
			if err != nil {
				t.Fatal(err)
			}
			return p
		},
		Inject: func(_ testing.TB, p port.Port, frame []byte) {
			f := outFrame{view: buffer.NewViewWithData(frame[virtio.EthernetHdrLen:]), size: uint32(len(frame))}
			copy(f.eth[:], frame)
			p.(*Port).deliver(&f, 0)
		},
	})
}
