package vhostuser

// resetDevice brings rings and device back to how they are at the beginning of a
// connection. What belongs to the connection stays: owner, protocol features,
// memory, and the call and err descriptors, of which QEMU sends err only once.
// Rings are stopped whether they are enabled or not, and nothing is refused, so
// that doing it again, or before anything was set up, is no error.
func (s *Session) resetDevice(*message) error {
	for _, r := range s.rings {
		if r == nil {
			continue
		}
		s.stop(r)
		s.dropRecord(r)
		s.endTracking(r)
		s.enable(r, false)
		*r = ring{index: r.index, call: r.call, err: r.err}
	}
	_ = s.config.changing(func() error { s.dev.Reset(); return nil })
	s.acked, s.featuresSet, s.enabledByDefault, s.status, s.everRan = 0, false, false, 0, false
	s.followIOMMU()
	s.followLogging()
	return nil
}
