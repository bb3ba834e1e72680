package rig

import (
	"net"
	"strings"

	"github.com/miekg/dns"
)

// Names that the resolvers of an Internet know.
const (
	WebName   = "www.example.test"  // Live4 and Live6
	WhoName   = "who.example.test"  // the address of the resolver that answers
	TextName  = "text.example.test" // TextRecord
	LargeName = "large.example.test"
	// LargeRecords is the number of LargeName's TXT records; together they are too long for a datagram.
	LargeRecords = 40
	// TextRecord is TextName's record as a zone file has it.
	TextRecord = `"one" "two; \"quoted\"" ""`
)

// nameServer is a resolver over UDP and TCP.
type nameServer struct {
	address string
	zone    map[string][]string // records by name and type
	udp     net.PacketConn
	tcp     net.Listener
}

func (i *Internet) startNames() error {
	for _, address := range []string{Resolver, OtherResolver} {
		s := &nameServer{address: address, zone: map[string][]string{
			WebName + ". A": {Live4}, WebName + ". AAAA": {Live6}, WhoName + ". A": {address}, TextName + ". TXT": {TextRecord},
		}}
		for n := range LargeRecords {
			s.zone[LargeName+". TXT"] = append(s.zone[LargeName+". TXT"], `"`+strings.Repeat(string(rune('a'+n%26)), 100+n)+`"`)
		}
		i.names = append(i.names, s)
		if err := s.start(i.Namespace); err != nil {
			return err
		}
	}
	return nil
}

func (s *nameServer) start(ns *Namespace) (err error) {
	at := net.JoinHostPort(s.address, "53")
	if s.udp, err = ns.ListenPacket(at); err != nil {
		return err
	}
	if s.tcp, err = ns.Listen(at); err != nil {
		return err
	}
	for _, server := range []*dns.Server{{PacketConn: s.udp, Handler: s}, {Listener: s.tcp, Handler: s}} {
		go func() { _ = server.ActivateAndServe() }() // ends with its socket
	}
	return nil
}

func (s *nameServer) close() {
	if s.udp != nil {
		s.udp.Close()
	}
	if s.tcp != nil {
		s.tcp.Close()
	}
}

// ServeDNS implements dns.Handler. An answer that the client cannot take over UDP is cut.
func (s *nameServer) ServeDNS(w dns.ResponseWriter, question *dns.Msg) {
	answer := new(dns.Msg).SetReply(question)
	q := question.Question[0]
	kind := dns.TypeToString[q.Qtype]
	known := false
	for key := range s.zone {
		known = known || strings.HasPrefix(key, strings.ToLower(q.Name)+" ")
	}
	if !known {
		answer.Rcode = dns.RcodeNameError
	}
	for _, data := range s.zone[strings.ToLower(q.Name)+" "+kind] {
		record, err := dns.NewRR(q.Name + " 60 IN " + kind + " " + data)
		if err != nil {
			answer.Rcode = dns.RcodeServerFailure
			break
		}
		answer.Answer = append(answer.Answer, record)
	}
	if w.LocalAddr().Network() == "udp" {
		size := dns.MinMsgSize
		if edns := question.IsEdns0(); edns != nil {
			size = int(edns.UDPSize())
			answer.SetEdns0(edns.UDPSize(), false)
		}
		answer.Truncate(size)
	}
	_ = w.WriteMsg(answer) // the client asks again
}
