package network

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestParseAndOpen(t *testing.T) {
	for text, kind := range map[string]string{
		"null":                               "null",
		"echo":                               "echo",
		"echo,swap=off,backlog=16":           "echo",
		"source":                             "source",
		"source,size=1500,rate=1e6,flows=16": "source",
		"source,mac=52:54:00:00:00:01":       "source",
		"user":                               "user",
		"user,ipv6=off,search=a.example,search=b.example,host=x:10.0.2.9,dns=192.0.2.53,deny=10.0.0.0/8,allow=*.example,rate-in=10Mbit": "user",
		"user,subnet=172.20.0.0/16,subnet6=fd12::/64,gateway6=fd12::1,lease=52:54:00:00:00:01=172.20.0.9,dhcp=off,ra=off,dns=off":       "user",
	} {
		n, err := Parse(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if n.String() != text {
			t.Errorf("String = %q, want %q", n, text)
		}
		p, err := n.Open(Options{QueuePairs: 2, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if p.Kind() != kind || !p.Status().Up {
			t.Errorf("%s: kind %s, status %+v", text, p.Kind(), p.Status())
		}
		if err := p.Close(); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "kind is missing",
		"bogus":                               `"bogus" is not available in this build: accepted are echo, null, sock, source, switch, tap, user`,
		"switch":                              "name is missing (accepted",
		"switch,name=a/b":                     "name=a/b: accepted are",
		"switch,name=a,ageing=1":              "ageing=1: accepted are durations from 1s",
		"switch,name=a,backlog=1":             "backlog=1: accepted are",
		"switch,name=a,mac=x":                 "six hexadecimal bytes",
		"switch,name=a,mac=ff:ff:ff:ff:ff:ff": "a unicast address",
		"switch,name=a,bogus=1":               `unknown parameter "bogus": accepted are name, ageing, backlog, mac, uplink`,
		"switch,name=a,uplink-name=tap0":      `unknown parameter "uplink-name"`,
		"switch,name=a,uplink=null":           "uplink=null: accepted are tap and user",
		"switch,name=a,uplink=tap,uplink-bogus=1":  `unknown parameter "uplink-bogus": accepted are uplink-queues, uplink-name`,
		"switch,name=a,uplink=tap,uplink-name=/":   "uplink: network tap: name=",
		"switch,name=a,uplink=tap,uplink-queues=0": "uplink-queues=0: accepted are",
		"sock":                           "path is missing (accepted: a path",
		"sock,path=@x":                   "abstract sockets",
		"sock,path=/x,mode=x":            "mode=x: accepted are octal",
		"sock,path=/x,mode=7777":         "mode=07777 is not accepted",
		"sock,path=/x,connect=2":         "accepted are on and off",
		"sock,path=/x,bogus=1":           `unknown parameter "bogus": accepted are path, connect, mode`,
		"xdp":                            `"xdp" is not available`,
		"null,x=1":                       "takes none",
		"user,bogus=1":                   `unknown parameter "bogus": accepted are ipv4, ipv6`,
		"user,ipv4=off,ipv6=off":         "ipv6=off is not accepted",
		"user,mtu=1279":                  "mtu=1279: accepted are whole numbers from 1280 to 65520",
		"user,subnet=10.0.2.1/24":        "subnet=10.0.2.1/24 is not accepted",
		"user,subnet=10":                 "subnet=10: accepted are prefixes",
		"user,gateway=10.0.3.1":          "gateway=10.0.3.1 is not accepted",
		"user,guest=x":                   "guest=x: accepted are addresses",
		"user,subnet6=fd00::/48":         "subnet6=fd00::/48 is not accepted",
		"user,publish=80":                "publish=80: one of the two ports is missing",
		"user,deny=a..b":                 "deny=a..b",
		"user,dns=x":                     `dns=x: "x" is no address`,
		"user,host=a":                    "host=a",
		"user,lease=a":                   "lease=a: accepted are MAC=ADDR",
		"user,rate-in=1":                 `rate-in: rate "1" is not accepted`,
		"user,subnet=10,deny=10.0.0.0/8": "subnet=10: accepted are prefixes",
		"user,guard=10.0.2.1/24":         "guard=10.0.2.1/24: has bits beyond its prefix",
		"user,guard=x":                   "guard=x: is neither a MAC nor an address",
		"user,guard=01:00:00:00:00:01":   "is no Ethernet address of a guest",
		"tap,guard=02:00:00:00:00:01,guard=02:00:00:00:00:02": "is the second MAC",
		"sock,path=/x,guard=::ffff:10.0.0.1":                  "is no address or network",
		"null,guard=10.0.2.15":                                "takes none",
		"user,rotate=1M":                                      "capture: the file is missing",
		"tap,name=a,rate-out=x":                               "network tap: rate-out",
		"user,dhcp=maybe":                                     "dhcp=maybe: accepted are on and off",
		`user,"`:                                              "is not key=value",
		"switch,name=a,uplink=user,uplink-mtu=1":              "uplink-mtu=1: accepted are",
		"echo,swap=maybe":                                     "accepted are on and off",
		"echo,backlog=0":                                      "backlog=0: accepted are whole numbers from 1",
		"source,size=1":                                       "size=1: accepted are",
		"source,rate=-1":                                      "rate=-1: accepted are",
		"source,mac=x":                                        "six hexadecimal bytes",
		"source,mac=x,bogus=1":                                "network source: ",
		"tap,name=a/b":                                        "name=",
		"tap,name=sixteen-letters!":                           "name=",
		"tap,bogus=1":                                         `unknown parameter "bogus": accepted are name, bridge`,
		"tap,queues=129":                                      "queues=129: accepted are",
		"tap,owner=no-such-user":                              "owner=",
	} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Parse(%q) = %v, want an error that contains %q", text, err, want)
		}
	}
}

// TestOpenTap: the tap has as many queues as the guest has pairs unless told otherwise.
func TestOpenTap(t *testing.T) {
	testmain.NeedTun(t)
	n, err := Parse("tap,name=vhdnet%d,up=off")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // a Network can be opened again after its port is closed
		p, err := n.Open(Options{QueuePairs: 2, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if p.Kind() != "tap" {
			t.Errorf("kind %s", p.Kind())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}
