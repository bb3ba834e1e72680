package pagemem

// ReleaseBulk is Release of one reference for each of ids, which it clobbers: pages of
// one pool in a row go there in one call, references on one page in a row are dropped
// by one atomic operation.
func (a *Arena) ReleaseBulk(ids []PageID, by OwnerID) {
	for len(ids) > 0 {
		n := 1
		if pool := a.pages[ids[0]].pool; pool == 0 {
			for n < len(ids) && ids[n] == ids[0] {
				n++
			}
			a.Unref(ids[0], int64(n))
		} else {
			for n < len(ids) && a.pages[ids[n]].pool == pool {
				n++
			}
			a.releaseTo(pool, ids[:n], by)
		}
		ids = ids[n:]
	}
}

func (a *Arena) releaseTo(pool uint16, ids []PageID, by OwnerID) {
	r := a.releasers.find(pool)
	if r == nil {
		a.Misuse("released to a pool that is gone", uint32(ids[0]))
		return
	}
	if bulk, ok := (*r).(BulkReleaser); ok {
		bulk.PutBulk(ids, by)
		return
	}
	for _, id := range ids {
		(*r).ReleasePage(id, 1, by)
	}
}
