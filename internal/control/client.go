package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
)

// maxReply bounds what a client reads: a thousand guests with 256 rings each stay below it.
const maxReply = 256 << 20

// Get asks the daemon behind the control socket at path and returns the body of the answer.
func Get(ctx context.Context, path, url string) ([]byte, error) {
	return Do(ctx, path, http.MethodGet, url, nil)
}

// Do sends a request with a body of JSON, or none, and returns the body of the answer. Every answer but a success is an error.
func Do(ctx context.Context, path, method, url string, send []byte) ([]byte, error) {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: writeTime}
	request, err := http.NewRequestWithContext(ctx, method, "http://vhostd"+url, bytes.NewReader(send))
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err
		}
		return nil, fmt.Errorf("control socket %s: %w: is vhostd serve --control running there?", path, err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxReply))
	if err != nil {
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	if response.StatusCode < 200 || response.StatusCode > 299 {
		var e ErrorReply
		if json.Unmarshal(body, &e) == nil && e.Error != "" {
			return nil, errors.New(e.Error)
		}
		return nil, fmt.Errorf("control socket %s: %s", path, response.Status)
	}
	return body, nil
}
