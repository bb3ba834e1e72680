package packet

import "github.com/vhostd/vhostd/pagemem"

// Release drops every reference that pkts hold and leaves the packets without
// fragments. Packets with no fragments are skipped, so a partly consumed array may be passed. by is
// the caller's own identity, which lets a pool recycle its pages directly.
// References on the same page in a row are dropped by one atomic operation, as
// vhost_net does for the pages of a batch.
func Release(a *pagemem.Arena, pkts []Packet, by pagemem.OwnerID) {
	var r run
	for i := range pkts {
		// The common packet continues the run; it costs no call.
		if p := &pkts[i]; p.NFrag == 1 && p.Frags[0].Page == r.page && r.n > 0 {
			p.NFrag, p.Len = 0, 0
			r.n++
			continue
		}
		r.add(a, &pkts[i], by)
	}
	r.flush(a, by)
}

// Release is [Release] for a single packet.
func (p *Packet) Release(a *pagemem.Arena, by pagemem.OwnerID) {
	var r run
	r.add(a, p, by)
	r.flush(a, by)
}

// run counts references on one page that are still to be dropped.
type run struct {
	page pagemem.PageID
	n    int
}

// add takes over p's references.
func (r *run) add(a *pagemem.Arena, p *Packet, by pagemem.OwnerID) {
	for i := range p.Frags[:p.NFrag] {
		if page := p.Frags[i].Page; page != r.page || r.n == 0 {
			r.flush(a, by)
			r.page = page
		}
		r.n++
	}
	p.NFrag, p.Len = 0, 0
}

func (r *run) flush(a *pagemem.Arena, by pagemem.OwnerID) {
	if r.n > 0 {
		a.Release(r.page, r.n, by)
		r.n = 0
	}
}

// ReleaseBulk is [Release] for packets whose pages are mostly different ones, such as
// received frames in pages of a pool: it hands them back many at a time. scratch
// holds the pages meanwhile; it must not be empty and should not be on the stack.
func ReleaseBulk(a *pagemem.Arena, pkts []Packet, scratch []pagemem.PageID, by pagemem.OwnerID) {
	n := 0
	for i := range pkts {
		p := &pkts[i]
		if p.NFrag == 1 && n < len(scratch) {
			scratch[n] = p.Frags[0].Page
			n++
			p.NFrag, p.Len = 0, 0
			continue
		}
		for j := range p.Frags[:p.NFrag] {
			if n == len(scratch) {
				a.ReleaseBulk(scratch, by)
				n = 0
			}
			scratch[n] = p.Frags[j].Page
			n++
		}
		p.NFrag, p.Len = 0, 0
	}
	a.ReleaseBulk(scratch[:n], by)
}
