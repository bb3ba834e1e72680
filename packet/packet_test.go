package packet_test

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
)

func newArena(t testing.TB) *pagemem.Arena {
	t.Helper()
	a, err := pagemem.NewArena(pagemem.Config{Bytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := a.Stats().Misuse; n != 0 {
			t.Errorf("%d references dropped that nobody held", n)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// frag puts data into a page of its own.
func frag(t testing.TB, a *pagemem.Arena, data []byte) packet.Frag {
	t.Helper()
	page, ok := a.Alloc(0, pagemem.NoReserve)
	if !ok {
		t.Fatal("no page")
	}
	f := packet.Frag{Addr: a.Addr(page), Len: uint32(len(data)), Page: page}
	copy(f.Bytes(), data)
	return f
}

func TestLayout(t *testing.T) {
	p := reflect.TypeFor[packet.Packet]()
	if n := p.Size(); n != 320 {
		t.Errorf("a packet has %d bytes, want 320: five cache lines", n)
	}
	frags, _ := p.FieldByName("Frags")
	if end := frags.Offset + 2*frags.Type.Elem().Size(); end != 64 {
		t.Errorf("the second fragment ends at byte %d, want 64", end)
	}
}

func TestAppendIsBounded(t *testing.T) {
	var p packet.Packet
	for i := range packet.MaxFrags {
		if !p.Append(packet.Frag{Len: 1}) {
			t.Fatalf("fragment %d refused", i)
		}
	}
	if p.Append(packet.Frag{Len: 1}) {
		t.Error("one fragment too many accepted")
	}
	if p.Len != packet.MaxFrags || !p.LenCheck() {
		t.Errorf("length %d, well formed %v", p.Len, p.LenCheck())
	}
}

func TestLenCheck(t *testing.T) {
	for _, test := range []struct {
		name string
		p    packet.Packet
		ok   bool
	}{
		{"empty", packet.Packet{}, true},
		{"sum differs", packet.Packet{Len: 5, NFrag: 1, Frags: [18]packet.Frag{{Len: 4}}}, false},
		{"empty fragment", packet.Packet{Len: 4, NFrag: 2, Frags: [18]packet.Frag{{Len: 4}}}, false},
		{"too many fragments", packet.Packet{NFrag: 19}, false},
		{"sum wraps", packet.Packet{Len: 1, NFrag: 2, Frags: [18]packet.Frag{{Len: 1 << 31}, {Len: 1<<31 + 1}}}, false},
	} {
		if got := test.p.LenCheck(); got != test.ok {
			t.Errorf("%s: %v, want %v", test.name, got, test.ok)
		}
	}
}

func TestCopyToMatchesConcatenation(t *testing.T) {
	a := newArena(t)
	rapid.Check(t, func(t *rapid.T) {
		var p packet.Packet
		var frame []byte
		for _, data := range rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 1, 40), 0, packet.MaxFrags).Draw(t, "fragments") {
			page, _ := a.Alloc(0, pagemem.NoReserve)
			f := packet.Frag{Addr: a.Addr(page), Len: uint32(len(data)), Page: page}
			copy(f.Bytes(), data)
			p.Append(f)
			frame = append(frame, data...)
		}
		defer p.Release(a, 0)
		off := rapid.IntRange(-1, len(frame)+1).Draw(t, "off")
		dst := make([]byte, rapid.IntRange(0, len(frame)+1).Draw(t, "len"))
		got := dst[:p.CopyTo(dst, off)]
		var want []byte
		if off >= 0 && off < len(frame) {
			want = frame[off:min(off+len(dst), len(frame))]
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("got %x, want %x", got, want)
		}
		head := make([]byte, 16)
		if n := p.PeekHeader(head); !bytes.Equal(head[:n], frame[:min(16, len(frame))]) {
			t.Fatalf("header is %x", head[:n])
		}
	})
}

func TestMoveTo(t *testing.T) {
	src := packet.Packet{Hdr: virtio.NetHdr{Flags: 1}, Flags: 2}
	src.Append(packet.Frag{Addr: 1, Len: 2, Page: 3})
	want := src
	var dst packet.Packet
	src.MoveTo(&dst)
	if dst != want {
		t.Errorf("moved packet differs:\n%s", cmp.Diff(want.Frags, dst.Frags))
	}
	if src.NFrag != 0 || src.Len != 0 {
		t.Errorf("the source still holds something: %+v", src)
	}
}

// countReleases records what a pool is told.
type countReleases struct {
	calls [][2]int // page, references
	by    pagemem.OwnerID
}

func (c *countReleases) ReleasePage(p pagemem.PageID, n int, by pagemem.OwnerID) {
	c.calls = append(c.calls, [2]int{int(p), n})
	c.by = by
}

func TestReleaseGroupsRuns(t *testing.T) {
	a := newArena(t)
	var pool countReleases
	id := a.Register(&pool)
	var pages [3]pagemem.PageID
	for i := range pages {
		pages[i], _ = a.Alloc(0, pagemem.NoReserve)
		a.SetReleaser(pages[i], id)
	}
	t.Cleanup(func() {
		for _, p := range pages {
			a.SetReleaser(p, 0)
			a.Unref(p, 1)
		}
		a.Unregister(id)
	})

	var pkts [4]packet.Packet
	for i, list := range [][]int{{0, 0}, {}, {0, 1}, {1, 2, 0}} {
		for _, page := range list {
			pkts[i].Append(packet.Frag{Len: 1, Page: pages[page]})
		}
	}
	packet.Release(a, pkts[:], 7)
	want := [][2]int{{int(pages[0]), 3}, {int(pages[1]), 2}, {int(pages[2]), 1}, {int(pages[0]), 1}}
	if diff := cmp.Diff(want, pool.calls); diff != "" {
		t.Errorf("releases (-want +got):\n%s", diff)
	}
	if pool.by != 7 {
		t.Errorf("released by %d, want 7", pool.by)
	}
	packet.Release(a, pkts[:], 7)
	if len(pool.calls) != len(want) {
		t.Error("a released packet still held references")
	}
}

func TestNoAllocations(t *testing.T) {
	a := newArena(t)
	pkts := make([]packet.Packet, 4)
	head := make([]byte, 64)
	page, _ := a.Alloc(0, pagemem.NoReserve)
	defer a.Unref(page, 1)
	allocs := testing.AllocsPerRun(100, func() {
		for i := range pkts {
			a.Retain(page, 1)
			pkts[i].Append(packet.Frag{Addr: a.Addr(page), Len: 100, Page: page})
			pkts[i].PeekHeader(head)
		}
		packet.Release(a, pkts, 0)
	})
	if allocs != 0 {
		t.Errorf("%v allocations a batch", allocs)
	}
}

func TestBytesViewsThePage(t *testing.T) {
	a := newArena(t)
	var p packet.Packet
	p.Append(frag(t, a, []byte("ab")))
	p.Append(frag(t, a, []byte("cde")))
	defer p.Release(a, 0)
	if got := string(p.Bytes(0)) + string(p.Bytes(1)); got != "abcde" {
		t.Errorf("got %q", got)
	}
}

// bulkReleases also takes pages many at a time.
type bulkReleases struct {
	countReleases
	bulks [][]pagemem.PageID
}

func (b *bulkReleases) PutBulk(ids []pagemem.PageID, _ pagemem.OwnerID) {
	b.bulks = append(b.bulks, append([]pagemem.PageID(nil), ids...))
}

func TestReleaseBulk(t *testing.T) {
	a := newArena(t)
	var pool bulkReleases
	id := a.Register(&pool)
	var pages [4]pagemem.PageID // three of the pool, one of nobody with two references more
	for i := range pages {
		pages[i], _ = a.Alloc(0, pagemem.NoReserve)
		if i < 3 {
			a.SetReleaser(pages[i], id)
		}
	}
	plain := pages[3]
	a.AddRef(plain, 2)
	t.Cleanup(func() {
		for _, p := range pages {
			a.SetReleaser(p, 0)
			a.Unref(p, 1)
		}
		a.Unregister(id)
	})
	var pkts [3]packet.Packet
	for i, list := range [][]pagemem.PageID{{pages[0], pages[1]}, {plain, plain}, {pages[2]}} {
		for _, p := range list {
			pkts[i].Append(packet.Frag{Addr: a.Addr(p), Len: 1, Page: p})
		}
	}
	packet.ReleaseBulk(a, pkts[:], make([]pagemem.PageID, 4), 0)
	want := [][]pagemem.PageID{{pages[0], pages[1]}, {pages[2]}}
	if diff := cmp.Diff(want, pool.bulks); diff != "" {
		t.Errorf("pages handed to the pool (-want +got):\n%s", diff)
	}
	if n := a.RefCount(plain); n != 1 {
		t.Errorf("the plain page has %d references, want 1", n)
	}
	for i := range pkts {
		if pkts[i].NFrag != 0 {
			t.Errorf("packet %d still holds fragments", i)
		}
	}
}
