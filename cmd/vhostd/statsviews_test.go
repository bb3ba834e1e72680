package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/control"
)

// TestPrintViews prints each view of a daemon that says what a hostile guest may have made it say: nothing gets at the terminal.
func TestPrintViews(t *testing.T) {
	const esc = `\u001b[2J\u0007\u009b31m`
	for view, c := range map[string]struct{ body, want string }{
		control.ViewFlows: {
			`{"total":70000,"limit":2,"protocols":[{"proto":"tcp","flows":2,"opened":3,"refused":1,"limited":4,"failed":5,"bytes-from-guest":2048,
			"bytes-to-guest":1048576,"packets-from-guest":7,"packets-to-guest":8}],"flows":[
			{"proto":"tcp","guest":"10.0.2.15:40000","remote":"[2001:db8::1]:443","state":"half-closed","age-seconds":3725.25,"idle-seconds":0.0125,
			"bytes-from-guest":1,"bytes-to-guest":2,"packets-from-guest":3,"packets-to-guest":4},
			{"proto":"tcp","guest":"10.0.2.15:22","remote":"","inbound":true,"state":"open` + esc + `\n","age-seconds":12.34,"idle-seconds":1}]}`,
			`guest vm1
PROTO  FLOWS  OPENED  REFUSED  LIMITED  FAILED  FROM GUEST  PACKETS  TO GUEST  PACKETS
tcp    2      3       1        4        5       2.0 KiB     7        1.0 MiB   8

2 of 70000 flows
PROTO  GUEST            WAY  REMOTE             STATE                              AGE     IDLE  FROM GUEST  PACKETS  TO GUEST  PACKETS
tcp    10.0.2.15:40000  ->   [2001:db8::1]:443  half-closed                        1h2m5s  13ms  1 B         3        2 B       4
tcp    10.0.2.15:22     <-   -                  "open\x1b[2J\a\u009b31m\n"         12.3s   1s    0 B         0        0 B       0
`,
		},
		control.ViewLeases: {
			`{"serving":true,"neighbors":2,"drops":{"malformed":3},"leases":[{"addr":"10.0.2.15","mac":"52:54:00:00:00:01","duid":"","name":"a\tb` + esc +
				`","state":"bound","expires":"2030-01-02T03:04:05Z","pinned":true}]}`,
			"\"a\\tb\\x1b[2J\\a\\u009b31m\"",
		},
		control.ViewDNS: {
			`{"serving":true,"stats":{"queries":9,"forwarded":8,"local":1},"upstreams":[{"domain":".","addr":"192.0.2.1:53","resting":true}],
			"hosts":[{"name":"x` + esc + `","addrs":["192.0.2.7","2001:db8::7"]}]}`,
			"192.0.2.7 2001:db8::7",
		},
		control.ViewPolicy: {
			`{"rules":[{"rule":"deny=10.0.0.0/8","hits":5,"ended":2}],"rest":"allow","refusals":{"rule":5,"metadata":0},"ended":{"rule":2}}`,
			"guest vm1\nRULE              DECIDED  ENDED\ndeny=10.0.0.0/8   5        2\n(the rest) allow  -        -\n\nrefused: 5 (rule 5)\nended: 2 (rule 2)\n",
		},
		control.ViewPublish: {
			`{"published":[{"publish":"unix:/run/a\nb:80","proto":"tcp","host":"/run/a\nb","guest":"10.0.2.15:80"}]}`,
			`tcp    "/run/a\nb"  10.0.2.15:80  "unix:/run/a\nb:80"`,
		},
	} {
		var out strings.Builder
		err := printViews(&out, view, []networkView{{"guest", "vm1", json.RawMessage(c.body)}})
		got := out.String()
		squeezed := func(s string) string { return strings.Join(strings.Fields(s), " ") }
		if err != nil || !strings.Contains(squeezed(got), squeezed(c.want)) {
			t.Errorf("%s: %v\n%s\nwant\n%s", view, err, got, c.want)
		}
		if strings.ContainsFunc(got, func(r rune) bool { return r != '\n' && r < ' ' || r >= 0x7f && r < 0xa0 }) {
			t.Errorf("%s: control characters in %q", view, got)
		}
	}
}

// TestViewArguments: what is no view, and what no flag accepts, is named.
func TestViewArguments(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"flow"}, `stats: no view "flow": accepted are flows, leases, dns, policy, publish`},
		{[]string{"flows", "a", "b"}, "2 names, wanted one"},
		{[]string{"flows", "--control", "/x", "--sort", "name"}, "sort=name: accepted are age, idle, bytes"},
		{[]string{"flows", "--control", "/x", "--limit", "0"}, "limit=0: accepted are 1 to 10000"},
		{[]string{"flows", "--control", "/x", "--proto", "sctp"}, "proto=sctp: accepted are tcp, udp, icmp"},
		{[]string{"leases"}, "--control is missing"},
	} {
		code, stdout, stderr := run(t, append([]string{"stats"}, tc.args...)...)
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) { wantError(t, exitUsage, tc.want, code, stdout, stderr) })
	}
}
