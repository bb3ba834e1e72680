package capture

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
	"golang.org/x/sys/unix"
)

// Bounds and defaults of [Options].
const (
	// MaxSnapLen is more than the largest frame has.
	MaxSnapLen   = 65_568
	MinSnapLen   = 14
	MinRotate    = 64 << 10
	DefaultFiles = 2
	MaxFiles     = 100
	// recordRoom is what a frame takes in the file beside its bytes, at most.
	recordRoom = 256
)

// Options configure a capture.
type Options struct {
	Path    string // an existing file is emptied
	SnapLen int    // bytes of each frame that are kept; 0 means all
	Rotate  int64  // bytes after which the next file begins; 0 is never
	Files   int    // files that rotation goes round; 0 means DefaultFiles
	Name    string // of the interface in the file, such as the guest's
	Ring    int    // bytes of each queue's ring; 0 means DefaultRing
	Logger  *slog.Logger
}

// Validate says which option is not accepted.
func (o *Options) Validate() error {
	switch {
	case o.Path == "":
		return errors.New("capture: the file's name is empty")
	case o.SnapLen != 0 && (o.SnapLen < MinSnapLen || o.SnapLen > MaxSnapLen):
		return fmt.Errorf("capture: snaplen=%d is not accepted (accepted: %d to %d bytes)", o.SnapLen, MinSnapLen, MaxSnapLen)
	case o.Rotate != 0 && o.Rotate < MinRotate:
		return fmt.Errorf("capture: rotate=%d is not accepted (accepted: at least %d bytes)", o.Rotate, MinRotate)
	case o.Files < 0 || o.Files == 1 || o.Files > MaxFiles:
		return fmt.Errorf("capture: %d files are not accepted (accepted: 2 to %d)", o.Files, MaxFiles)
	}
	return nil
}

// ParseSize reads a number of bytes with one of the suffixes k, M and G, powers of 1024, such as 100M.
func ParseSize(text string) (int64, error) {
	digits, shift := text, 0
	if i := strings.IndexAny("kMG", text[max(0, len(text)-1):]); text != "" && i >= 0 {
		digits, shift = text[:len(text)-1], 10*(i+1)
	}
	n, err := strconv.ParseUint(digits, 10, 62)
	if err != nil || n > 1<<62>>shift {
		return 0, fmt.Errorf("size %q is not accepted (accepted: bytes, also with k, M or G, such as 100M)", text)
	}
	return int64(n << shift), nil
}

// Writer writes one capture. All methods are safe for concurrent use.
type Writer struct {
	opts  Options
	wake  chan struct{}
	stop  chan struct{}
	ended chan struct{}
	files []*os.File

	frames, lost atomic.Uint64 // written, and lost for good: by rings that are closed, and by a file that takes no more

	mu     sync.Mutex
	rings  []*Ring
	closed bool

	// What follows is guarded by mu, too.
	current int
	ng      *pcapgo.NgWriter
	buffer  *bufio.Writer // in front of written; the NgWriter uses it as its own
	written countingWriter
	broken  bool
}

const bufferSize = 256 << 10

// countingWriter knows how much went to the present file.
type countingWriter struct {
	file *os.File
	n    int64
}

func (c *countingWriter) Write(b []byte) (int, error) {
	n, err := c.file.Write(b)
	c.n += int64(n)
	return n, err
}

// Open makes the files, readable by their owner alone, and starts to write. Close ends it.
func Open(opts Options) (*Writer, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	if opts.SnapLen == 0 {
		opts.SnapLen = MaxSnapLen
	}
	if opts.Files == 0 {
		opts.Files = DefaultFiles
	}
	if opts.Rotate == 0 {
		opts.Files = 1
	}
	if opts.Ring == 0 {
		opts.Ring = DefaultRing
	}
	opts.Ring = max(opts.Ring, minRing) &^ (align - 1)
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	w := &Writer{opts: opts, wake: make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{})}
	for i := range opts.Files {
		file, err := openFile(fileName(opts.Path, i))
		if err != nil {
			w.closeFiles()
			return nil, err
		}
		w.files = append(w.files, file)
	}
	if err := w.begin(0); err != nil {
		w.closeFiles()
		return nil, err
	}
	go w.run()
	return w, nil
}

func fileName(path string, i int) string {
	if i == 0 {
		return path
	}
	return path + "." + strconv.Itoa(i)
}

// openFile refuses what is no plain file: a pipe whose reader stalls would stall the writer's end, and a link may lead anywhere.
func openFile(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no plain file", path)
	}
	if err == nil {
		err = file.Truncate(0)
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("capture: %w", err)
	}
	return file, nil
}

// begin empties a file and starts it.
func (w *Writer) begin(i int) error {
	file := w.files[i]
	if err := file.Truncate(0); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	w.current, w.written = i, countingWriter{file: file}
	w.buffer = bufio.NewWriterSize(&w.written, bufferSize)
	ng, err := pcapgo.NewNgWriterInterface(w.buffer, pcapgo.NgInterface{
		Name: w.opts.Name, Description: "as the guest sends and receives", LinkType: layers.LinkTypeEthernet,
		SnapLength:          uint32(w.opts.SnapLen),
		TimestampResolution: 9,
	}, pcapgo.NgWriterOptions{SectionInfo: pcapgo.NgSectionInfo{Application: "vhostd"}})
	if err == nil {
		err = ng.Flush()
	}
	if err != nil {
		return fmt.Errorf("capture: write %s: %w", file.Name(), err)
	}
	w.ng = ng
	return nil
}

// Ring makes the ring of one queue.
func (w *Writer) Ring() *Ring {
	r := &Ring{w: w, data: make([]byte, w.opts.Ring)}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rings = append(w.rings, r)
	return r
}

func (w *Writer) remove(r *Ring) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if i := slices.Index(w.rings, r); i >= 0 {
		if !w.closed {
			r.take(w.frame)
		}
		w.lost.Add(r.lost.Load())
		w.rings = slices.Delete(w.rings, i, i+1)
	}
}

// Frames is how many frames were written, and how many were not.
func (w *Writer) Frames() (written, lost uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	lost = w.lost.Load()
	for _, r := range w.rings {
		lost += r.lost.Load()
	}
	return w.frames.Load(), lost
}

// Close writes what was committed and closes the files. Rings take nothing any more.
func (w *Writer) Close() error {
	w.mu.Lock()
	if !w.closed {
		w.closed = true
		close(w.stop)
	}
	w.mu.Unlock()
	<-w.ended
	return nil
}

func (w *Writer) run() {
	defer close(w.ended)
	for {
		select {
		case <-w.wake:
			w.drain()
		case <-w.stop:
			w.drain()
			w.mu.Lock()
			if !w.broken {
				w.check(w.ng.Flush())
			}
			w.mu.Unlock()
			w.closeFiles()
			return
		}
	}
}

// drain writes what is in the rings now. The lock keeps a ring from being taken away; no worker waits for it.
func (w *Writer) drain() {
	w.mu.Lock()
	defer w.mu.Unlock()
	more := false
	for _, r := range w.rings {
		more = r.take(w.frame) || more
	}
	if more {
		select {
		case w.wake <- struct{}{}: // what has come meanwhile
		default:
		}
	} else if !w.broken {
		w.check(w.ng.Flush()) // nothing has: who reads the file sees all
	}
}

// frame writes one frame. A file that takes no more ends the capture, not the traffic.
func (w *Writer) frame(info Info, lost uint32, frame []byte) {
	if w.broken {
		w.lost.Add(1)
		return
	}
	if w.opts.Rotate != 0 && w.written.n+int64(w.buffer.Buffered()+len(frame))+recordRoom > w.opts.Rotate {
		w.check(w.ng.Flush())
		w.check(w.begin((w.current + 1) % len(w.files)))
	}
	if !w.broken {
		w.check(w.ng.WritePacketWithOptions(gopacket.CaptureInfo{
			Timestamp: info.Time, CaptureLength: len(frame), Length: info.Length,
		}, frame, options(info, lost)))
	}
	if w.broken {
		w.lost.Add(1)
	} else {
		w.frames.Add(1)
	}
}

func (w *Writer) check(err error) {
	if err != nil && !w.broken {
		w.broken = true
		w.opts.Logger.Error("capture ended", "file", w.files[w.current].Name(), "error", err)
	}
}

func (w *Writer) closeFiles() {
	for _, file := range w.files {
		file.Close()
	}
}

// options tell what the bytes do not: direction, loss, and that the frame stands for several.
func options(info Info, lost uint32) pcapgo.NgPacketOptions {
	flags := pcapgo.NgEpbFlags{Direction: pcapgo.NgEpbFlagDirectionOutbound}
	if info.Direction == ToGuest {
		flags.Direction = pcapgo.NgEpbFlagDirectionInbound
	}
	o := pcapgo.NgPacketOptions{Flags: &flags}
	if lost > 0 {
		n := uint64(lost)
		o.DropCount = &n
	}
	if info.Mark != Whole {
		o.Comments = []string{fmt.Sprintf("to be cut into %s of %d bytes", markNames[info.Mark%Mark(len(markNames))], info.Size)}
	}
	return o
}

var markNames = [...]string{"frames", "TCP segments over IPv4", "TCP segments over IPv6", "UDP datagrams"}
