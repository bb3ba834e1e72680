package network

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port/porttest"
)

// held is a log whose writer waits, at the first line with a message, until release is closed.
type held struct {
	slog.Handler
	message          string
	entered, release chan struct{}
	once             *sync.Once
}

func (h held) Handle(_ context.Context, r slog.Record) error {
	if r.Message == h.message {
		h.once.Do(func() {
			close(h.entered)
			<-h.release
		})
	}
	return nil
}

func (h held) Enabled(context.Context, slog.Level) bool { return true }

func (h held) WithAttrs([]slog.Attr) slog.Handler { return h }

// TestFollowHoldsUpNobody: while the uplink of one switch looks through its flows, which may be many, other guests come and go, and the
// status is told.
func TestFollowHoldsUpNobody(t *testing.T) {
	const described = "switch,name=lan,uplink=user,uplink-dns=off,uplink-ipv6=off,uplink-host-loopback=on"
	s, rig := newSwitches(t)
	log := held{slog.DiscardHandler, "connection ended by policy", make(chan struct{}), make(chan struct{}), &sync.Once{}}
	s.opts.Logger = slog.New(log)
	n := mustParse(t, described)
	p, err := n.Open(Options{QueuePairs: 1, Switches: s})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	q := rig.Open(t, p, 0)
	frame := datagramToGateway(t)
	if !porttest.Eventually(func() bool {
		q.Send([]packet.Packet{rig.Packet(t, frame, 0)})
		return s.UserUplinks()[0].Port.FlowCount() == 1
	}) {
		t.Fatal("no flow began")
	}
	followed := make(chan error, 1)
	go func() {
		_, err := n.Follow(p, mustParse(t, described+",uplink-deny=10.0.2.2/32"), s)
		followed <- err
	}()
	select {
	case <-log.entered:
	case err := <-followed:
		t.Fatalf("no flow was ended, %v", err)
	case <-time.After(time.Minute):
		t.Fatal("no flow was ended")
	}
	done := make(chan error, 1)
	go func() {
		var errs []error
		for _, text := range []string{"switch,name=lan", "switch,name=other"} {
			other, err := s.open(text)
			if err == nil {
				err = other.Close()
			}
			errs = append(errs, err)
		}
		s.Status()
		done <- errors.Join(errs...)
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Error("others wait for the uplink of a switch")
	}
	close(log.release)
	if err := <-followed; err != nil {
		t.Error(err)
	}
}

// datagramToGateway begins a flow from a guest at 10.0.2.20.
func datagramToGateway(t *testing.T) []byte {
	t.Helper()
	b := gopacket.NewSerializeBuffer()
	ip := &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolUDP, SrcIP: []byte{10, 0, 2, 20}, DstIP: []byte{10, 0, 2, 2}}
	datagram := &layers.UDP{SrcPort: 4000, DstPort: 9}
	if err := datagram.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	if err := gopacket.SerializeLayers(b, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		&layers.Ethernet{SrcMAC: []byte{2, 0, 0, 0, 0, 20}, DstMAC: []byte{0x52, 0x56, 10, 0, 2, 2}, EthernetType: layers.EthernetTypeIPv4},
		ip, datagram, gopacket.Payload("x")); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
