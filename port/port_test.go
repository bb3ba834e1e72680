package port_test

import (
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines()))
}

func TestRARP(t *testing.T) {
	frame := port.RARP([6]byte{0x52, 0x54, 0, 1, 2, 3})
	const want = "ffffffffffff" + "525400010203" + "8035" + // to all, from the machine, RARP
		"0001" + "0800" + "06" + "04" + "0003" + // Ethernet, IPv4, request reverse
		"525400010203" + "00000000" + "525400010203" + "00000000" +
		"000000000000000000000000000000000000"
	if got := hex.EncodeToString(frame[:]); got != want {
		t.Errorf("frame\n%s, want\n%s", got, want)
	}
}

// stub is a queue that counts how often it is closed.
type stub struct {
	port.Queue
	closed int
	err    error
}

func (s *stub) Close() error {
	s.closed++
	return s.err
}

func TestQueueSet(t *testing.T) {
	var set port.QueueSet
	open := func(i int, q *stub, err error) error {
		_, failed := set.Open(i, func() (port.Queue, error) { return q, err })
		return failed
	}
	first, last, broken := &stub{}, &stub{}, errors.New("broken")
	if err := open(0, first, nil); err != nil {
		t.Fatal(err)
	}
	if err := open(port.MaxQueues-1, last, nil); err != nil {
		t.Fatal(err)
	}
	if err := open(0, first, nil); err == nil || !strings.Contains(err.Error(), "open already") {
		t.Errorf("open twice: %v", err)
	}
	for _, i := range []int{-1, port.MaxQueues} {
		if err := open(i, first, nil); err == nil || !strings.Contains(err.Error(), "0 to 127") {
			t.Errorf("open pair %d: %v", i, err)
		}
	}
	if err := open(1, nil, broken); !errors.Is(err, broken) {
		t.Errorf("error of the constructor: %v", err)
	}
	if err := open(1, &stub{err: broken}, nil); err != nil {
		t.Errorf("open after a failure: %v", err)
	}
	set.Remove(0)
	if err := set.Close(); !errors.Is(err, broken) {
		t.Errorf("close: %v, want the queue's error", err)
	}
	if first.closed != 0 || last.closed != 1 {
		t.Errorf("closed %d and %d times, want 0 and 1", first.closed, last.closed)
	}
	if err := open(2, first, nil); !errors.Is(err, port.ErrClosed) {
		t.Errorf("open after Close: %v", err)
	}
}

func TestCheckOffloads(t *testing.T) {
	const offered = virtio.FNetCSum | virtio.FNetGuestCSum
	for _, tc := range []struct {
		acked virtio.Features
		wrong string
	}{
		{0, ""},
		{offered, ""},
		{virtio.FNetCSum | virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FNetMQ, ""},
		{virtio.FNetGuestTSO4, "GUEST_TSO4"},
		{offered | virtio.FNetHostUFO, "HOST_UFO"},
	} {
		err := port.CheckOffloads("kind", offered, tc.acked)
		if tc.wrong == "" && err != nil || tc.wrong != "" && (err == nil || !strings.Contains(err.Error(), tc.wrong)) {
			t.Errorf("acked %v: error %v, want one about %q", tc.acked, err, tc.wrong)
		}
	}
}

func TestOptionError(t *testing.T) {
	err := &port.OptionError{Kind: "tap", Option: "mtu", Value: "7", Accept: "68 to 65520 bytes"}
	if got, want := err.Error(), "network tap: mtu=7 is not accepted (accepted: 68 to 65520 bytes)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
