package vhostuser

import "fmt"

// configMigrating in the flags of SET_CONFIG says that the bytes come from the
// device of the guest's former host (rust-vmm's LIVE_MIGRATION). Bit 0 is no help:
// rust-vmm, and so crosvm and libkrun, set it for fields that the driver may write,
// vhost-user.rst gives it to migration, and QEMU sends the message for no network
// device.
const configMigrating = 1 << 1

const configFlags = configMigrating | 1<<0

// configRange checks a config message against its payload and the space, and
// returns the fixed part.
func configRange(m *message, space []byte) (ConfigSpace, error) {
	c := decodeConfigSpace(m.body)
	if got := uint64(m.Size) - configHdrLen; uint64(c.Size) != got {
		return c, fmt.Errorf("config access announces %d bytes, the payload holds %d", c.Size, got)
	}
	if c.Size == 0 || c.Size > maxConfig {
		return c, fmt.Errorf("config access of %d bytes, 1 to %d are accepted", c.Size, maxConfig)
	}
	if end := uint64(c.Offset) + uint64(c.Size); end > uint64(len(space)) {
		return c, fmt.Errorf("config access of bytes %d to %d, the space has %d", c.Offset, end, len(space))
	}
	return c, nil
}

// getConfig answers with the bytes asked for. A range outside the space gets the
// empty payload with which the specification reports an error.
func (s *Session) getConfig(m *message) error {
	space := s.config.read()
	c, err := configRange(m, space)
	if err != nil {
		s.once.log("GET_CONFIG", "config read refused", "err", err)
		return nil
	}
	m.reply = append(c.Append(nil), space[c.Offset:c.Offset+c.Size]...)
	return nil
}

// setConfig leaves to the device what may be written.
func (s *Session) setConfig(m *message) error {
	c, err := configRange(m, s.config.read())
	if err != nil {
		return err
	}
	if c.Flags&^configFlags != 0 {
		return fmt.Errorf("config write with flags %#x, known are %#x", c.Flags, configFlags)
	}
	return s.config.changing(func() error {
		return s.dev.SetConfig(int(c.Offset), m.body[configHdrLen:], c.Flags&configMigrating != 0)
	})
}
