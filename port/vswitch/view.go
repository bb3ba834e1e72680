package vswitch

// view is what senders see of a switch's ports: it is never changed but replaced, so that they need no lock.
type view struct {
	ports   []*Port
	byIndex []*Port // by the index in the table; nil where there is no port
	uplink  *Port
	pins    []pin // open addressing, at most half full; empty if no port is pinned
}

// pin says whose an address is.
type pin struct {
	mac  uint64
	port *Port
}

// newView describes the ports.
func newView(ports []*Port, absent *Port) *view {
	v := &view{ports: ports, byIndex: make([]*Port, firstIndex)}
	pinned := 0
	for _, p := range ports {
		for int(p.index) >= len(v.byIndex) {
			v.byIndex = append(v.byIndex, nil)
		}
		v.byIndex[p.index] = p
		if p.isUplink() {
			v.uplink = p
		}
		if p.pinned != 0 {
			pinned++
		}
	}
	v.byIndex[left] = absent
	if pinned == 0 {
		return v
	}
	size := 1
	for size < 2*pinned {
		size *= 2
	}
	v.pins = make([]pin, size)
	for _, p := range ports {
		if p.pinned != 0 {
			*v.pin(p.pinned) = pin{p.pinned, p}
		}
	}
	return v
}

// pin returns the place of an address among the pins: its own or a free one.
func (v *view) pin(mac uint64) *pin {
	mask := uint64(len(v.pins) - 1)
	for i := mix(mac, 0); ; i++ {
		if p := &v.pins[i&mask]; p.mac == mac || p.mac == 0 {
			return p
		}
	}
}

// ownerOf returns the port that is pinned to the address, or nil.
func (v *view) ownerOf(mac uint64) *Port {
	if len(v.pins) == 0 {
		return nil
	}
	return v.pin(mac).port
}

// at returns the port with the index. A port that this view does not know any more, or not yet, has nobody who could receive.
func (v *view) at(index uint16) *Port {
	if int(index) < len(v.byIndex) && v.byIndex[index] != nil {
		return v.byIndex[index]
	}
	return v.byIndex[left]
}
