package dns

import (
	"bytes"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines()))
}

// resolver is a resolver whose answers the test makes, on UDP and TCP.
type resolver struct {
	at     netip.AddrPort
	answer atomic.Pointer[func(query []byte, stream bool) [][]byte]
	asked  atomic.Int64 // datagrams and messages on streams
	tcp    atomic.Int64 // of those, messages on streams
	mu     sync.Mutex
	ports  map[string]int // questions by our port
}

func newResolver(t testing.TB, answer func(query []byte, stream bool) [][]byte) *resolver {
	t.Helper()
	r := &resolver{ports: map[string]int{}}
	r.answer.Store(&answer)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.at = l.Addr().(*net.TCPAddr).AddrPort()
	conn, err := net.ListenPacket("udp", r.at.String())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { l.Close(); conn.Close(); wg.Wait() })
	wg.Go(func() {
		buffer := make([]byte, maxAnswer)
		for {
			n, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			r.asked.Add(1)
			r.mu.Lock()
			r.ports[from.String()]++
			r.mu.Unlock()
			for _, a := range (*r.answer.Load())(bytes.Clone(buffer[:n]), false) {
				_, _ = conn.WriteTo(a, from)
			}
		}
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(5 * time.Second))
				for {
					query, err := readStream(c)
					if err != nil {
						return
					}
					r.asked.Add(1)
					r.tcp.Add(1)
					for _, a := range (*r.answer.Load())(query, true) {
						_ = writeStream(c, a)
					}
				}
			})
		}
	})
	return r
}

func (r *resolver) set(answer func(query []byte, stream bool) [][]byte) { r.answer.Store(&answer) }

// records answers every question with the records, whose names it leaves, and the code.
func records(rcode int, lines ...string) func([]byte, bool) [][]byte {
	return func(query []byte, _ bool) [][]byte {
		var q mdns.Msg
		if q.Unpack(query) != nil {
			return nil
		}
		m := new(mdns.Msg).SetRcode(&q, rcode)
		m.RecursionAvailable, m.Compress = true, true
		for _, line := range lines {
			rr, err := mdns.NewRR(line)
			if err != nil {
				panic(err)
			}
			m.Answer = append(m.Answer, rr)
		}
		b, err := m.Pack()
		if err != nil {
			panic(err)
		}
		return [][]byte{b}
	}
}

func silence([]byte, bool) [][]byte { return nil }

// site is a forwarder that serves on the loopback.
type site struct {
	*Forwarder
	t    testing.TB
	addr string
	log  *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newSite(t testing.TB, c Config, filter Filter) *site {
	t.Helper()
	s := &site{t: t, log: &lockedBuffer{}}
	opts := Options{Logger: slog.New(slog.NewTextHandler(s.log, nil))}
	if filter != nil {
		opts.Filter = func(netip.Addr) Filter { return filter }
	}
	f, err := New(c, opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Forwarder = f
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.addr = l.Addr().String()
	conn, err := net.ListenPacket("udp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f.ServePacket(conn); err != nil {
			t.Error(err)
		}
	})
	wg.Go(func() {
		if err := f.ServeStream(l); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { f.Close(); wg.Wait() })
	return s
}

func via(resolvers ...*resolver) Config {
	c := Config{Timeout: 5 * time.Second}
	for _, r := range resolvers {
		c.Upstreams = append(c.Upstreams, Upstream{Addr: r.at})
	}
	return c
}

func (s *site) exchange(network string, m *mdns.Msg) *mdns.Msg {
	s.t.Helper()
	c := mdns.Client{Net: network, Timeout: 20 * time.Second, UDPSize: maxAnswer}
	answer, _, err := c.Exchange(m, s.addr)
	if err != nil {
		s.t.Fatalf("%v over %s: %v", m.Question, network, err)
	}
	if len(answer.Question) != 1 || answer.Question[0] != m.Question[0] || !answer.Response || answer.Id != m.Id {
		s.t.Errorf("the question %v came back as %v", m.Question, answer.Question)
	}
	return answer
}

func (s *site) ask(name string, kind uint16) *mdns.Msg {
	s.t.Helper()
	return s.exchange("udp", new(mdns.Msg).SetQuestion(name, kind))
}
