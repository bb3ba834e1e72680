package frontend

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/uffd"
)

// Origin is the host from which a guest comes whose memory is still there: what the memory held when it
// left, by region and page.
type Origin struct {
	// Delay is the longest time that a page takes; every page takes another one. Stalled pages
	// never come.
	Delay time.Duration
	// Stalled, if set, picks the guest addresses of pages that never come.
	Stalled func(gpa uint64) bool
	// Faults counts the pages that the back-end waited for.
	Faults atomic.Uint64

	mem    *Memory
	pages  []map[uint64][]byte // by offset in the file
	fd     int
	bases  []uint64
	quit   chan struct{}
	all    sync.WaitGroup
	failed atomic.Pointer[error]
}

const originPage = 1 << uffd.PageShift

// Leave takes the memory's contents away. From then on only the back-end may touch it, until Deliver.
func (m *Memory) Leave() (*Origin, error) {
	o := &Origin{mem: m, fd: -1, quit: make(chan struct{})}
	for _, r := range m.Regions {
		pages := make(map[uint64][]byte)
		for off := uint64(0); off < uint64(len(r.file)); {
			data, err := unix.Seek(r.FD, int64(off), unix.SEEK_DATA)
			if errors.Is(err, unix.ENXIO) {
				break
			}
			if err != nil {
				return nil, fmt.Errorf("look for data: %w", err)
			}
			off = uint64(data) &^ (originPage - 1)
			pages[off] = append([]byte(nil), r.file[off:off+originPage]...)
			off += originPage
		}
		o.pages = append(o.pages, pages)
		const punch = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
		if err := unix.Fallocate(r.FD, punch, 0, int64(len(r.file))); err != nil {
			return nil, fmt.Errorf("punch a hole: %w", err)
		}
	}
	return o, nil
}

// Serve brings pages that the back-end misses: fd is its userfaultfd, which Close closes, bases the addresses of
// the regions there.
func (o *Origin) Serve(fd int, bases []uint64) {
	o.fd, o.bases = fd, bases
	o.all.Go(func() {
		for {
			at, err := uffd.NextFault(fd, 20*time.Millisecond)
			select {
			case <-o.quit:
				return
			default:
			}
			switch {
			case errors.Is(err, uffd.ErrNoFault):
			case err != nil:
				o.fail(err)
				return
			default:
				o.Faults.Add(1)
				o.all.Go(func() { o.answer(at) })
			}
		}
	})
}

// answer brings one page in its time.
func (o *Origin) answer(at uint64) {
	for i, r := range o.mem.Regions {
		off := at - o.bases[i]
		if off >= r.Size {
			continue
		}
		if o.Stalled != nil && o.Stalled(r.GPA+off) {
			return
		}
		if o.Delay > 0 {
			time.Sleep(rand.N(o.Delay))
		}
		o.fail(uffd.Place(o.fd, at, o.contents(i, r.MmapOffset+off)))
		return
	}
	o.fail(fmt.Errorf("a fault at %#x, which is in no region", at))
}

func (o *Origin) contents(region int, off uint64) []byte {
	if page := o.pages[region][off]; page != nil {
		return page
	}
	return make([]byte, originPage)
}

func (o *Origin) fail(err error) {
	if err != nil {
		o.failed.CompareAndSwap(nil, &err)
	}
}

// Deliver brings all pages that did not come yet.
func (o *Origin) Deliver() error {
	for i, r := range o.mem.Regions {
		for off, page := range o.pages[i] {
			if off < r.MmapOffset || off-r.MmapOffset >= r.Size {
				continue
			}
			if err := uffd.Place(o.fd, o.bases[i]+off-r.MmapOffset, page); err != nil {
				return err
			}
		}
	}
	return o.Err()
}

// Err is what went wrong so far.
func (o *Origin) Err() error {
	if err := o.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Close ends the service.
func (o *Origin) Close() error {
	close(o.quit)
	o.all.Wait()
	if o.fd >= 0 {
		return unix.Close(o.fd)
	}
	return nil
}
