package virtionet

import "github.com/vhostd/vhostd/pool"

// addPool makes pl the page pool of worker w: frames for the guest are received into its pages, and allocators of transmit
// buffers find it as the one that the worker recycles into. The caller holds d.control.
func (d *Device) addPool(w int, pl *pool.Pool) error {
	if err := d.recyclers.Register(pl); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pools[w] = pl
	return nil
}

// dropPool ends a pool that no pair uses any more; its counters stay.
func (d *Device) dropPool(w int) {
	pl := d.pools[w]
	d.recyclers.Unregister(pl)
	d.opts.Workers[w].Do(pl.Destroy)
	s := pl.Stats()
	s.InFlight = 0
	d.mu.Lock()
	defer d.mu.Unlock()
	d.poolsBefore.Add(s)
	d.pools[w] = nil
}

// poolStats are the counters of all pools, also of former connections. The caller holds d.mu.
func (d *Device) poolStats() pool.Stats {
	s := d.poolsBefore
	for _, pl := range d.pools {
		if pl != nil {
			s.Add(pl.Stats())
		}
	}
	return s
}
