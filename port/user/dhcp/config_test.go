package dhcp

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

func TestConfig(t *testing.T) {
	for _, tc := range []struct {
		change func(*Config)
		wrong  string
	}{
		{func(*Config) {}, ""},
		{func(c *Config) { c.Subnet = netip.Prefix{} }, "subnet"},
		{func(c *Config) { c.Subnet = netip.MustParsePrefix("10.0.2.0/31") }, "subnet"},
		{func(c *Config) { c.Subnet = netip.MustParsePrefix("10.0.2.1/24") }, "subnet"},
		{func(c *Config) { c.Subnet = netip.MustParsePrefix("fd00::/64") }, "subnet"},
		{func(c *Config) { c.Gateway = ip("10.0.3.1") }, "gateway"},
		{func(c *Config) { c.Gateway = ip("10.0.2.255") }, "gateway"},
		{func(c *Config) { c.First = netip.Addr{} }, "pool"},
		{func(c *Config) { c.First = ip("10.0.2.0") }, "pool"},
		{func(c *Config) { c.Last = ip("10.0.2.14") }, "pool"},
		{func(c *Config) { c.Last = ip("10.0.2.255") }, "pool"},
		{func(c *Config) { c.MTU = 67 }, "MTU 67"},
		{func(c *Config) { c.MTU = 65536 }, "MTU 65536"},
		{func(c *Config) { c.BootFile = strings.Repeat("x", 128) }, "128 bytes"},
		{func(c *Config) { c.TFTPServer = strings.Repeat("x", 64) }, "64 bytes"},
		{func(c *Config) { c.HostName = "a.b" }, `host name "a.b"`},
		{func(c *Config) { c.Lease = time.Second }, "lease time 1s"},
		{func(c *Config) { c.Lease = MaxLease + 1 }, "lease time"},
		{func(c *Config) { c.Routes = make([]Route, maxList+1) }, "17 routes"},
		{func(c *Config) { c.Routes = make([]Route, 1) }, "route"},
		{func(c *Config) { c.Pins = []Pin{{Addr: ip("10.0.2.9")}} }, "MAC or a name"},
		{func(c *Config) { c.Pins = []Pin{{MAC: station(1), Name: "x", Addr: ip("10.0.2.9")}} }, "MAC or a name"},
		{func(c *Config) { c.Pins = []Pin{{Name: "x.y", Addr: ip("10.0.2.9")}} }, "x.y"},
		{func(c *Config) { c.Pins = []Pin{{Name: "x", Addr: ip("10.0.2.2")}} }, "10.0.2.2"},
		{func(c *Config) { c.Pins = []Pin{{Name: "x", Addr: ip("10.0.2.9")}, {Name: "y", Addr: ip("10.0.2.9")}} }, "twice"},
		{func(c *Config) { c.DNS = []netip.Addr{ip("fd00::1")} }, "family"},
		{func(c *Config) { c.DNS = make([]netip.Addr, maxList+1) }, "17 DNS servers"},
		{func(c *Config) { c.Search = []string{"a..b"} }, `"a..b"`},
		{func(c *Config) { c.Search = []string{"bücher.example"} }, "bücher"},
		{func(c *Config) {
			c.Search = []string{strings.Repeat("a.", 126) + "a", strings.Repeat("b.", 126) + "b", "c.d"}
		}, "together"},
	} {
		c := config4()
		tc.change(&c)
		_, err := New(c, nil, nil)
		if tc.wrong == "" && err != nil || tc.wrong != "" && (err == nil || !strings.Contains(err.Error(), tc.wrong)) {
			t.Errorf("error %v, want one about %q", err, tc.wrong)
		}
	}
}

func TestLastOf(t *testing.T) {
	for prefix, want := range map[string]string{
		"10.0.2.0/24": "10.0.2.255", "10.0.0.0/8": "10.255.255.255", "10.0.2.4/30": "10.0.2.7", "0.0.0.0/0": "255.255.255.255",
		"fd00::/64": "fd00::ffff:ffff:ffff:ffff", "fd00::/127": "fd00::1",
	} {
		if got := lastOf(netip.MustParsePrefix(prefix)); got != ip(want) {
			t.Errorf("%s: %v, want %s", prefix, got, want)
		}
	}
}

func TestMACText(t *testing.T) {
	var m MAC
	if err := m.UnmarshalText([]byte("52:54:00:00:00:09")); err != nil || m != station(9) {
		t.Errorf("%v, %v", m, err)
	}
	for _, text := range []string{"", "x", "52:54:00:00:00:00:00:09"} {
		if err := m.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}
