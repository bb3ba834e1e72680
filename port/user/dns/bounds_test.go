package dns

import (
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// TestPortsChange: sockets are shared, but not for long.
func TestPortsChange(t *testing.T) {
	r := newResolver(t, records(mdns.RcodeSuccess, "x.example. 60 IN A 192.0.2.1"))
	s := newSite(t, via(r), nil)
	for range 3 * usesOfSocket {
		s.ask("x.example.", mdns.TypeA)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ports) != 3 {
		t.Errorf("%d ports for %d questions", len(r.ports), 3*usesOfSocket)
	}
	s.sockets.mu.Lock()
	defer s.sockets.mu.Unlock()
	if n := len(s.sockets.all); n > 1 {
		t.Errorf("%d sockets are open", n)
	}
}

// TestFlood: a guest with more questions than its share gets SERVFAIL for the rest at once, and everything is over afterwards.
func TestFlood(t *testing.T) {
	r := newResolver(t, silence)
	c := via(r)
	c.Timeout = 500 * time.Millisecond
	s := newSite(t, c, nil)
	conn, err := net.Dial("udp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const n = 4 * MaxPerClient
	answers := make(chan int)
	go func() {
		answered := 0
		defer func() { answers <- answered }()
		buffer := make([]byte, 512)
		for _ = conn.SetReadDeadline(time.Now().Add(15 * time.Second)); answered < n; answered++ {
			if _, err := conn.Read(buffer); err != nil {
				return
			}
			if buffer[3]&15 != mdns.RcodeServerFailure {
				t.Errorf("answer %x", buffer[:12])
			}
		}
	}()
	query, _ := new(mdns.Msg).SetQuestion("x.example.", mdns.TypeA).Pack()
	for range n {
		_, _ = conn.Write(query)
		time.Sleep(100 * time.Microsecond)
	}
	s.sockets.mu.Lock()
	open := len(s.sockets.all)
	s.sockets.mu.Unlock()
	if open > 2*MaxPerClient/perSocket {
		t.Errorf("%d sockets for %d questions", open, MaxPerClient)
	}
	answered := <-answers
	if st := s.Stats(); st.Busy == 0 || uint64(answered) != st.Busy+st.Failed {
		t.Errorf("%d answers, %+v", answered, st)
	}
	s.Close()
	if s.load.total != 0 || len(s.load.by) != 0 {
		t.Errorf("%d questions are still counted", s.load.total)
	}
}

func TestLoad(t *testing.T) {
	var l load
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for range MaxPerClient {
		if !l.begin(a, MaxQueries) {
			t.Fatal("refused too early")
		}
	}
	if l.begin(a, MaxQueries) || !l.begin(b, MaxQueries) || l.begin(b, MaxPerClient+1) {
		t.Error("the bounds do not hold")
	}
	for range MaxPerClient {
		l.end(a)
	}
	l.end(b)
	if l.total != 0 || len(l.by) != 0 {
		t.Errorf("%+v is left", &l)
	}
}

// TestCloseUnderWay: Close does not wait for resolvers.
func TestCloseUnderWay(t *testing.T) {
	r := newResolver(t, silence)
	c := via(r)
	c.Timeout = time.Minute
	s := newSite(t, c, nil)
	query, _ := new(mdns.Msg).SetQuestion("x.example.", mdns.TypeA).Pack()
	conn, err := net.Dial("udp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stream, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	_, _ = conn.Write(query)
	_ = writeStream(stream, query)
	for end := time.Now().Add(5 * time.Second); r.asked.Load() < 2 && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	begin := time.Now()
	s.Close()
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("Close took %v", took)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.ServeStream(l); err != nil {
		t.Error(err)
	}
	if _, err := l.Accept(); err == nil {
		t.Error("a listener given to a closed forwarder is open")
	}
}

func TestConcurrentUse(t *testing.T) {
	r := newResolver(t, records(mdns.RcodeSuccess, "x.example. 60 IN A 192.0.2.1"))
	s := newSite(t, via(r), nil)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			network := []string{"udp", "tcp"}[i%2]
			for range 50 {
				if a := s.exchange(network, new(mdns.Msg).SetQuestion("x.example.", mdns.TypeA)); a.Rcode != mdns.RcodeSuccess {
					t.Errorf("%v", a)
				}
				_, _ = s.Stats(), s.Resolvers()
				if err := s.Configure(via(r)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
