package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
)

// TestLowPorts: a port below 1024 can be published at the start. Later the sandboxed process has no right to it, and says what to do.
func TestLowPorts(t *testing.T) {
	testmain.NeedRoot(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, "control")
	p := start(t, "serve", "--socket", dir+"/vm0", "--network", "user,publish=127.77.0.1:81:80", "--control", socket)
	p.ready()
	c, err := net.Dial("tcp", "127.77.0.1:81")
	if err != nil {
		t.Fatalf("published at the start: %v", err)
	}
	c.Close()
	client := &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", socket)
	}}}
	defer client.CloseIdleConnections()
	body := fmt.Sprintf(`{"socket":"%s/vm1","network":"user,publish=127.77.0.1:82:80"}`, dir)
	response, err := client.Post("http://vhostd/v1/guests/vm1", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode/100 == 2 {
		t.Fatalf("%s %s %v, want a refusal", response.Status, text, err)
	}
	for _, part := range []string{"127.77.0.1:82:80", "CAP_NET_BIND_SERVICE", "publish it then", "ip_unprivileged_port_start"} {
		if !strings.Contains(string(text), part) {
			t.Errorf("%s does not say %q", text, part)
		}
	}
	p.stop()
}
