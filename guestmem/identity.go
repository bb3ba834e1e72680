package guestmem

// Origin says what the byte at host is, in terms that outlive the mapping: the file by device and inode, the
// region, and the region's place in both. ok is false if no region of the table holds it.
func (t *Table) Origin(host uintptr) (dev, ino uint64, region RegionSpec, ok bool) {
	if t == nil {
		return 0, 0, RegionSpec{}, false
	}
	for i := range t.regions {
		if r := &t.regions[i]; uint64(host-r.host) < r.Size {
			return r.mapping.file.dev, r.mapping.file.ino, r.RegionSpec, true
		}
	}
	return 0, 0, RegionSpec{}, false
}
