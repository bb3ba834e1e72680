package network

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
)

// arp asks for the gateway of the default subnet, or looks at a reply.
func arp(from byte) []byte {
	f := make([]byte, 60)
	copy(f, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, from, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, from, 10, 0, 2, from})
	copy(f[38:], []byte{10, 0, 2, 2})
	return f
}

// isReply says whether a frame is the gateway's answer to arp(to).
func isReply(f []byte, to byte) bool {
	return len(f) >= 42 && bytes.Equal(f[:6], []byte{2, 0, 0, 0, 0, to}) && f[12] == 8 && f[13] == 6 && f[21] == 2 && bytes.Equal(f[28:32], []byte{10, 0, 2, 2})
}

func wantReply(t *testing.T, rig *porttest.Rig, q port.Queue, from byte) {
	t.Helper()
	q.Send([]packet.Packet{rig.Packet(t, arp(from), 0)})
	var in [1]packet.Packet
	if !porttest.Eventually(func() bool {
		if q.Recv(in[:]) == 0 {
			return false
		}
		f := porttest.Bytes(&in[0])
		rig.Release(in[:])
		return isReply(f, from)
	}) {
		t.Errorf("station %d: the gateway does not answer", from)
	}
}

// TestUserAsUplink: the guests of a switch share one user network.
func TestUserAsUplink(t *testing.T) {
	s, rig := newSwitches(t)
	for _, from := range []byte{20, 21} {
		p, err := s.open("switch,name=lan,uplink=user,uplink-dns=off")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		wantReply(t, rig, rig.Open(t, p, 0), from)
	}
	list := s.Status()
	if len(list) != 1 || list[0].Uplink != "user,dns=off" || !list[0].UplinkUp || list[0].Stations != 3 {
		t.Errorf("status %+v", list)
	}
}

// TestEdge: limits and a capture stand in front of the network, which can still be told to be one of ours.
func TestEdge(t *testing.T) {
	path := filepath.Join(t.TempDir(), "guest.pcapng")
	n, err := Parse("user,dns=off,rate-in=100Mbit,rate-out=100Mbit,capture=" + path + ",snaplen=200")
	if err != nil {
		t.Fatal(err)
	}
	rig := porttest.NewRig(t)
	p, err := n.Open(Options{Name: "guest", QueuePairs: 1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := UserPort(p); !ok {
		t.Error("it is not known as a user network")
	}
	q, err := p.OpenQueue(0, rig.Resources())
	if err != nil {
		t.Fatal(err)
	}
	wantReply(t, rig, q, 15)
	time.Sleep(10 * time.Millisecond)
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	text, err := os.ReadFile(path)
	if err != nil || !bytes.Contains(text, arp(15)) {
		t.Errorf("captured %d bytes, %v", len(text), err)
	}
}

// TestWithPublish: further ports of the user network, and of no other.
func TestWithPublish(t *testing.T) {
	dir := t.TempDir()
	n, err := Parse("user,publish=1:1")
	if err != nil {
		t.Fatal(err)
	}
	n, err = n.WithPublish([]string{"[::1]:8080-8081:80/udp", "unix:" + dir + "/a,b:22"})
	if want := `user,publish=1:1,publish="[::1]:8080-8081:80/udp",publish="unix:` + dir + `/a,b:22"`; err != nil || n.String() != want {
		t.Errorf("%v, %v, want %s", n, err, want)
	}
	if paths := n.PublishPaths(); len(paths) != 1 || paths[0] != dir+"/a,b" {
		t.Errorf("paths: %q", paths)
	}
	if same, err := n.WithPublish(nil); err != nil || same.String() != n.String() {
		t.Errorf("nothing added: %v, %v", same, err)
	}
	if _, err := n.WithPublish([]string{"80"}); err == nil || !strings.Contains(err.Error(), "publish=80: one of the two ports is missing") {
		t.Errorf("bad port: %v", err)
	}
	if _, err := n.WithPublish([]string{`unix:/a:22",host-loopback=on,publish="unix:/b:22`}); err == nil || !strings.Contains(err.Error(), "quote") {
		t.Errorf("parameters behind a quote: %v", err)
	}
	for _, text := range []string{"tap", "null", "switch,name=lan,uplink=user"} {
		n, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.WithPublish([]string{"2222:22"}); err == nil || !strings.Contains(err.Error(), "publishes no ports: accepted with the network user") {
			t.Errorf("%s: %v", text, err)
		}
	}
}
