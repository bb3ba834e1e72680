package guest

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

// FetchArgs describes a request over HTTP: a page, or with Upload that many bytes that are put there.
type FetchArgs struct {
	URL     string        `json:"url"`
	Upload  int64         `json:"upload,omitempty"`
	Seed    uint64        `json:"seed,omitempty"`
	Timeout time.Duration `json:"timeout"`
}

// FetchResult is the answer. StreamResult is about the bytes that were put, or got.
type FetchResult struct {
	StreamResult
	Status int    `json:"status"`
	Text   string `json:"text"` // the first bytes of the answer
}

// maxText bounds FetchResult.Text.
const maxText = 256

// Fetch makes the request; the host's name is resolved as the system says.
func Fetch(args FetchArgs) (result FetchResult, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), args.Timeout)
	defer cancel()
	method, body := http.MethodGet, io.Reader(nil)
	var sent *digestReader
	if args.Upload > 0 {
		sent = newDigestReader(io.LimitReader(Pattern(args.Seed), args.Upload))
		method, body = http.MethodPut, sent
	}
	request, err := http.NewRequestWithContext(ctx, method, args.URL, body)
	if err != nil {
		return result, err
	}
	request.ContentLength = args.Upload
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}
	answer, err := client.Do(request)
	if err != nil {
		return result, err
	}
	defer answer.Body.Close()
	text := &head{}
	result.Status = answer.StatusCode
	result.StreamResult, err = ReceiveStream(io.TeeReader(answer.Body, text))
	if result.Text = string(text.bytes); sent != nil {
		result.StreamResult = sent.result()
	}
	return result, err
}

// head keeps the first bytes that are written to it.
type head struct{ bytes []byte }

func (h *head) Write(p []byte) (int, error) {
	h.bytes = append(h.bytes, p[:min(len(p), maxText-len(h.bytes))]...)
	return len(p), nil
}

// WebPage is what a Web shows at its root.
const WebPage = "This page came from a web server on the other side of vhostd.\n"

// Web is a handler with a page, /bytes/N (N bytes of Pattern(N)) and uploads, which it answers with their digest.
func Web() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, WebPage) })
	mux.HandleFunc("GET /bytes/{n}", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Length", fmt.Sprint(n))
		_, _ = SendStream(w, n, uint64(n)) // the client counts
	})
	mux.HandleFunc("PUT /upload", func(w http.ResponseWriter, r *http.Request) {
		result, err := ReceiveStream(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		fmt.Fprint(w, result.SHA256)
	})
	return mux
}

// ServeWeb serves Web until the listener is closed.
func ServeWeb(listener net.Listener) {
	server := http.Server{Handler: Web(), ReadHeaderTimeout: time.Minute}
	_ = server.Serve(listener) // ends with the listener
}
