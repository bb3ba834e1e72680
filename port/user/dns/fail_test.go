package dns

import (
	"net"
	"net/netip"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// TestFail: a defect that a question brings to light is told to whoever uses the forwarder, which can still be closed.
func TestFail(t *testing.T) {
	told := make(chan any, 1)
	f, err := New(Config{Upstreams: []Upstream{{Addr: netip.MustParseAddrPort("127.0.0.1:1")}}}, Options{
		Filter: func(netip.Addr) Filter { panic("injected defect") }, Fail: func(cause any) { told <- cause },
	})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- f.ServePacket(conn) }()
	client, err := net.Dial("udp", conn.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	question, err := new(mdns.Msg).SetQuestion("x.example.", mdns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Write(question); err != nil {
		t.Fatal(err)
	}
	select {
	case cause := <-told:
		if cause != "injected defect" {
			t.Errorf("told of %v", cause)
		}
	case <-time.After(20 * time.Second):
		t.Error("nobody was told")
	}
	f.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
