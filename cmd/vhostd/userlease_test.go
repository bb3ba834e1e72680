package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// TestLeasesInTheStateDir: leases of a user network outlive the process, in the sandbox too, and go with the guest.
func TestLeasesInTheStateDir(t *testing.T) {
	dir := t.TempDir()
	socket, state := filepath.Join(dir, "vm0"), filepath.Join(dir, "state")
	serve := func() (*process, *frontend.Pair) {
		p := start(t, "serve", "--socket", socket, "--network", "user,dns=off", "--state-dir", state)
		p.ready()
		pair, err := connect(t, socket).StartPair(0)
		if err != nil {
			t.Fatal(err)
		}
		return p, pair
	}
	p, pair := serve()
	if got := lease(t, pair, 1); got != "10.0.2.15" {
		t.Errorf("the first station got %s", got)
	}
	_ = p.cmd.Process.Kill()
	<-p.ended
	p, pair = serve()
	if got := lease(t, pair, 2); got != "10.0.2.16" {
		t.Errorf("after a restart another station got %s", got)
	}
	p.stop()
	if info, err := os.Stat(filepath.Join(state, "vm0.leases")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
}

// lease boots a station without an address, and says which one it gets.
func lease(t *testing.T, p *frontend.Pair, station byte) string {
	t.Helper()
	mac := []byte{0x52, 0x54, 0, 0, 0, station}
	exchange := func(m *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
		t.Helper()
		payload := m.ToBytes()
		b := header.UDP(make([]byte, header.UDPMinimumSize+len(payload)))
		b.Encode(&header.UDPFields{SrcPort: 68, DstPort: 67, Length: uint16(len(b))})
		copy(b.Payload(), payload)
		frame := frame4([4]byte{}, [4]byte{255, 255, 255, 255}, header.UDPProtocolNumber, 0, false, b)
		copy(frame, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		copy(frame[6:], mac)
		if _, err := p.PostRx(16); err != nil {
			t.Fatal(err)
		}
		if err := p.SendTx(virtio.NetHdr{}, frame, frontend.Direct); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
			_, f, err := p.RecvFrame(20 * time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if len(f) < 42 || f[23] != byte(header.UDPProtocolNumber) {
				continue // an advertisement
			}
			if answer, err := dhcpv4.FromBytes(f[42:]); err == nil {
				return answer
			}
		}
		t.Fatal("no answer")
		return nil
	}
	discover, err := dhcpv4.NewDiscovery(mac)
	if err != nil {
		t.Fatal(err)
	}
	request, err := dhcpv4.NewRequestFromOffer(exchange(discover))
	if err != nil {
		t.Fatal(err)
	}
	return exchange(request).YourIPAddr.String()
}
