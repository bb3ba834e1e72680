package guest

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"math/rand/v2"
	"time"
)

// StreamArgs describes one TCP connection that the guest opens, as soon as somebody listens, and uses in one direction.
type StreamArgs struct {
	Addr    string        `json:"addr"`
	Receive bool          `json:"receive,omitempty"` // read until the end instead of sending
	Bytes   int64         `json:"bytes,omitempty"`   // to send
	Seed    uint64        `json:"seed,omitempty"`    // of the bytes to send
	Rests   Rests         `json:"rests,omitzero"`    // of who receives
	Zeros   bool          `json:"zeros,omitempty"`   // zeros to send, and no digest: making and digesting bytes costs an emulated guest the most
	Timeout time.Duration `json:"timeout"`           // for the whole
}

// Rests are pauses of a receiver, each time that Every bytes have come; with 0 there are none.
type Rests struct {
	Every int64         `json:"every,omitempty"`
	For   time.Duration `json:"for,omitempty"`
}

// ServeArgs describes one TCP connection that the guest accepts and reads to the end.
type ServeArgs struct {
	Port    int           `json:"port"`
	Timeout time.Duration `json:"timeout"` // for the whole
}

// StreamResult is what one end saw of a stream.
type StreamResult struct {
	Bytes  int64         `json:"bytes"`
	SHA256 string        `json:"sha256"`
	Took   time.Duration `json:"took"`
	// Longest is the longest time that a receiver with rests waited for bytes.
	Longest time.Duration `json:"longest,omitempty"`
}

const streamBlock = 256 << 10

// Pattern is an endless source of pseudo-random bytes.
func Pattern(seed uint64) io.Reader {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	return rand.NewChaCha8(key)
}

// SendStream writes n pattern bytes to w and returns their digest.
func SendStream(w io.Writer, n int64, seed uint64) (StreamResult, error) {
	return copyStream(w, io.LimitReader(Pattern(seed), n))
}

// SendUntil is SendStream that ends early, after whole blocks, when stop is closed.
func SendUntil(w io.Writer, n int64, seed uint64, stop <-chan struct{}) (StreamResult, error) {
	return copyStream(w, until{io.LimitReader(Pattern(seed), n), stop})
}

// until is a reader that is at its end once stop is closed.
type until struct {
	r    io.Reader
	stop <-chan struct{}
}

// Read implements io.Reader.
func (u until) Read(p []byte) (int, error) {
	select {
	case <-u.stop:
		return 0, io.EOF
	default:
		return u.r.Read(p)
	}
}

// ReceiveStream reads r to its end and returns the digest of what came.
func ReceiveStream(r io.Reader) (StreamResult, error) {
	return copyStream(io.Discard, r)
}

// ReceiveResting is ReceiveStream with rests.
func ReceiveResting(r io.Reader, rests Rests) (StreamResult, error) {
	resting := &restingReader{r: r, rests: rests, next: rests.Every}
	result, err := ReceiveStream(resting)
	result.Longest = resting.longest
	return result, err
}

// restingReader rests.
type restingReader struct {
	r       io.Reader
	rests   Rests
	n, next int64
	longest time.Duration
}

// Read implements io.Reader.
func (r *restingReader) Read(p []byte) (int, error) {
	if r.rests.Every > 0 && r.n >= r.next {
		r.next += r.rests.Every
		time.Sleep(r.rests.For)
	}
	start := time.Now()
	n, err := r.r.Read(p)
	r.longest = max(r.longest, time.Since(start))
	r.n += int64(n)
	return n, err
}

func copyStream(w io.Writer, r io.Reader) (StreamResult, error) {
	start := time.Now()
	digest := sha256.New()
	// The struct hides ReadFrom and WriteTo of the ends: all bytes must pass the digest in blocks of one size.
	n, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(w, digest)}, struct{ io.Reader }{r}, make([]byte, streamBlock))
	return StreamResult{Bytes: n, SHA256: hex.EncodeToString(digest.Sum(nil)), Took: time.Since(start)}, err
}

// SendZeros writes n zeros to w.
func SendZeros(w io.Writer, n int64) (result StreamResult, err error) {
	start, block := time.Now(), make([]byte, streamBlock)
	for result.Bytes < n && err == nil {
		var k int
		k, err = w.Write(block[:min(n-result.Bytes, streamBlock)])
		result.Bytes += int64(k)
	}
	result.Took = time.Since(start)
	return result, err
}

// ReceiveAny is the other end of [SendZeros]. The time begins with the first byte.
func ReceiveAny(r io.Reader) (result StreamResult, err error) {
	block := make([]byte, streamBlock)
	var start time.Time
	for err == nil {
		var k int
		k, err = r.Read(block)
		if result.Bytes == 0 {
			start = time.Now()
		}
		result.Bytes += int64(k)
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	result.Took = time.Since(start)
	return result, err
}

// digestReader digests what is read from it.
type digestReader struct {
	r      io.Reader
	digest hash.Hash
	n      int64
	start  time.Time
	took   time.Duration
}

func newDigestReader(r io.Reader) *digestReader {
	return &digestReader{r: r, digest: sha256.New(), start: time.Now()}
}

// Read implements io.Reader.
func (d *digestReader) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	d.digest.Write(p[:n])
	d.n += int64(n)
	d.took = time.Since(d.start)
	return n, err
}

func (d *digestReader) result() StreamResult {
	return StreamResult{Bytes: d.n, SHA256: hex.EncodeToString(d.digest.Sum(nil)), Took: d.took}
}
