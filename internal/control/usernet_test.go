package control

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/worker"
)

// real is a daemon with guests on the given networks, by name, and its API.
func real(t *testing.T, networks map[string]string) func(method, url, body string) (int, string) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	arena, err := pagemem.NewArena(pagemem.Config{Bytes: 64 << 20, Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	w, err := worker.New(worker.Options{Name: "worker0", CPU: -1, Wake: worker.Block, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	d := daemon.New(daemon.Options{Arena: arena, Workers: []*worker.Loop{w}, Logger: log})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := d.Close(ctx); err != nil {
			t.Error(err)
		}
		w.Close()
		if err := arena.Close(); err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	for name, network := range networks {
		g := config.DefaultGuest()
		g.Name, g.Socket, g.Network, g.QueuePairs = name, filepath.Join(dir, name), network, 1
		spec, err := g.Parse()
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Add(spec, daemon.Source{}); err != nil {
			t.Fatal(err)
		}
	}
	h := Handler(d, "v1", log)
	return func(method, url, body string) (int, string) {
		r := httptest.NewRecorder()
		h.ServeHTTP(r, httptest.NewRequest(method, url, strings.NewReader(body)))
		return r.Code, r.Body.String()
	}
}

// TestUserNetworkViews: each view of a guest's own network and of a switch's, and what is said where there is none.
func TestUserNetworkViews(t *testing.T) {
	do := real(t, map[string]string{
		"vm1": "user,dns=127.0.0.1:9,host=db.example:192.0.2.5,deny=198.51.100.0/24",
		"vm2": "switch,name=lan,uplink=user,uplink-dhcp=off,uplink-dns=off", "vm3": "switch,name=lan", "vm4": "null", "vm5": "switch,name=bare",
	})
	for _, step := range []struct {
		method, url, body string
		code              int
		want              string
	}{
		{"GET", "/v1/networks", "", 200, `{"owner":"guest","name":"vm1","path":"/v1/guests/vm1","flows":0}`},
		{"GET", "/v1/networks", "", 200, `{"owner":"switch","name":"lan","path":"/v1/networks/lan","flows":0}`},
		{"GET", "/v1/guests/vm1/flows", "", 200, `"total":0,"limit":100,"protocols":[{"proto":"tcp","flows":0,`},
		{"GET", "/v1/guests/vm1/flows?limit=5&sort=bytes&proto=udp&guest=10.0.2.15", "", 200, `"limit":5`},
		{"GET", "/v1/guests/vm1/flows?limit=0", "", 400, "limit=0: accepted are 1 to 10000"},
		{"GET", "/v1/guests/vm1/flows?limit=99999", "", 400, "accepted are 1 to 10000"},
		{"GET", "/v1/guests/vm1/flows?sort=name", "", 400, "accepted are age, idle, bytes"},
		{"GET", "/v1/guests/vm1/flows?order=age", "", 400, "order: accepted are proto, guest, sort and limit"},
		{"GET", "/v1/guests/vm1/flows?sort=age&sort=idle", "", 400, "sort is given twice"},
		{"GET", "/v1/guests/vm1/leases", "", 200, `{"serving":true,"leases":[],`},
		{"GET", "/v1/guests/vm1/dns", "", 200, `"upstreams":[{"domain":".","addr":"127.0.0.1:9"}],"hosts":[{"name":"db.example","addrs":["192.0.2.5"]}`},
		{"GET", "/v1/guests/vm1/policy", "", 200, `{"rules":[{"rule":"deny=198.51.100.0/24","hits":0}],"rest":"allow"`},
		{"GET", "/v1/guests/vm1/publish", "", 200, `{"published":[]}`},
		{"GET", "/v1/networks/lan/leases", "", 200, `"serving":false`},
		{"GET", "/v1/networks/lan/dns", "", 200, `"serving":false`},
		{"GET", "/v1/networks/lan/flows", "", 200, `"flows":[]`},
		{"GET", "/v1/guests/vm3/flows", "", 404, "it is on switch lan: see /v1/networks/lan"},
		{"GET", "/v1/guests/vm4/flows", "", 404, "guest vm4: there is no user network, its network is null"},
		{"GET", "/v1/guests/vm9/flows", "", 404, "guest vm9: does not exist"},
		{"GET", "/v1/networks/bare/flows", "", 404, "switch bare: there is no user network"},
		{"GET", "/v1/networks/vm1/flows", "", 404, "no switch has this name"},
		{"GET", "/v1/guests/vm1/routes", "", 404, "flows, leases, dns, policy and publish"},
	} {
		code, got := do(step.method, step.url, step.body)
		if code != step.code || !strings.Contains(got, step.want) || !json.Valid([]byte(got)) {
			t.Errorf("%s %s = %d %s, want %d with %s", step.method, step.url, code, got, step.code, step.want)
		}
	}
}

// TestUserMetrics: the same for Prometheus.
func TestUserMetrics(t *testing.T) {
	do := real(t, map[string]string{"vm1": "user,dns=127.0.0.1:9", "vm2": "switch,name=lan,uplink=user,uplink-dns=off"})
	code, got := do("GET", "/metrics", "")
	for _, line := range []string{
		`vhostd_user_flows{guest="vm1",proto="tcp",switch=""} 0`, `vhostd_user_flows{guest="",proto="icmp",switch="lan"} 0`,
		`vhostd_user_bytes_total{direction="to_guest",guest="vm1",proto="udp",switch=""} 0`,
		`vhostd_user_flows_not_opened_total{guest="vm1",proto="tcp",reason="policy",switch=""} 0`,
		`vhostd_user_dns_queries_total{guest="vm1",result="forwarded",switch=""} 0`,
		`vhostd_user_policy_refusals_total{guest="vm1",reason="metadata",switch=""} 0`,
	} {
		if code != 200 || !strings.Contains(got, "\n"+line+"\n") {
			t.Errorf("%d: no line %q in\n%s", code, line, got)
		}
	}
}

// TestPublishAtRunTime: ports are published, listed and taken back; what is there already, or taken, is told apart.
func TestPublishAtRunTime(t *testing.T) {
	do := real(t, map[string]string{"vm1": "user,dns=off", "vm2": "user,dns=off"})
	path := filepath.Join(t.TempDir(), "web")
	unix := fmt.Sprintf("unix:%s:80", path)
	body := func(what string) string { return fmt.Sprintf(`{"publish":%q}`, what) }
	for _, step := range []struct {
		method, guest, body string
		code                int
		want                string
	}{
		{"POST", "vm1", body(unix), 201, unix},
		{"POST", "vm1", body(unix), 409, "it is published already (" + unix + ")"},
		{"POST", "vm2", body(unix), 409, path + " is there already"},
		{"GET", "vm1", "", 200, fmt.Sprintf(`{"published":[{"publish":%q,"proto":"tcp","host":%q,"guest":"10.0.2.15:80"}]}`, unix, path)},
		{"POST", "vm1", body("80"), 400, "one of the two ports is missing"},
		{"POST", "vm1", body("127.0.0.1:81:192.0.2.9:80"), 400, "no address of a guest of this network"},
		{"POST", "vm1", `{"port":80}`, 400, "body is not a publication"},
		{"DELETE", "vm1", body("127.0.0.1:81:80"), 404, "it is not published"},
		{"DELETE", "vm1", body(unix), 200, unix},
		{"DELETE", "vm1", body(unix), 404, "it is not published"},
		{"POST", "vm2", body(unix), 201, unix},
	} {
		code, got := do(step.method, "/v1/guests/"+step.guest+"/publish", step.body)
		if code != step.code || !strings.Contains(got, step.want) {
			t.Errorf("%s %s %s = %d %s, want %d with %s", step.method, step.guest, step.body, code, got, step.code, step.want)
		}
	}
}
