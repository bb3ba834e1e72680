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
	Zeros   bool          `json:"zeros,omitempty"`   // to send, without a digest: both cost an emulated guest the most
	Timeout time.Duration `json:"timeout"`           // for the whole
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

// ReceiveStream reads r to its end and returns the digest of what came.
func ReceiveStream(r io.Reader) (StreamResult, error) {
	return copyStream(io.Discard, r)
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
