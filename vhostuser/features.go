package vhostuser

import (
	"fmt"

	"github.com/vhostd/vhostd/virtio"
)

// unserved are device features that need messages or ring code that the session
// does not have: RING_RESET and NOTIFICATION_DATA, which QEMU passes to the guest
// without ever telling the back-end.
const unserved = virtio.FNotificationData | virtio.FRingReset

// onRequest are protocol features that Options.Protocol adds to the offer. rust-vmm's
// vhost up to 0.16 takes bit 21, GPA_ADDRESSES, for SHMEM.
// The other two belong together: a base without a drain, and the region that names what
// was not drained.
const onRequest = ProtoGPAAddresses | ProtoBaseInflight | ProtoSkipDrain

func offeredFeatures(dev Device) virtio.Features {
	return dev.Features()&^unserved | sessionFeatures
}

func offeredProtocol(dev Device) ProtocolFeatures {
	p := ProtoMQ | ProtoRARP | ProtoReplyAck | ProtoNetMTU | ProtoInflight | ProtoMemSlots | ProtoStatus | ProtoResetDevice
	p |= ProtoLogShmfd | ProtoDeviceState
	if dev.Config() != nil {
		p |= ProtoConfig
	}
	if dev.Features().Has(virtio.FAccessPlatform) {
		p |= ProtoBackendReq // QEMU exits if it finds one without the other
	}
	return p
}

func (s *Session) getFeatures(m *message) error {
	m.replyU64(uint64(s.offered))
	return nil
}

// setFeatures accepts the same set again at any time: QEMU sends it once per
// queue pair, when rings of earlier pairs already run. LOG_ALL may change at any
// time, because that is how logging is switched.
func (s *Session) setFeatures(m *message) error {
	want := virtio.Features(m.u64())
	if extra := want &^ s.offered; extra != 0 {
		return fmt.Errorf("features %v (%#x) are not offered by this device, which offers %v", extra, uint64(extra), s.offered)
	}
	if s.featuresSet && want == s.acked {
		return nil
	}
	if err := s.logAcceptable(want); err != nil {
		return err
	}
	if s.featuresSet && want^s.acked == virtio.FVhostLogAll {
		s.acked = want
		s.followLogging()
		return nil
	}
	if err := s.reconfigure(s.rings...); err != nil {
		return fmt.Errorf("features cannot change from %v to %v: %w", s.acked, want, err)
	}
	if err := s.dev.SetFeatures(want &^ sessionFeatures); err != nil {
		return fmt.Errorf("features %v: %w", want, err)
	}
	s.acked, s.featuresSet = want, true
	s.followIOMMU()
	s.followLogging()
	s.enabledByDefault = !want.Has(virtio.FVhostUserProtocolFeatures)
	if s.enabledByDefault {
		for _, r := range s.rings {
			if r != nil {
				s.enable(r, true)
			}
		}
	}
	s.startReady()
	return nil
}

// setOwner begins the session in the specification's words. A second one is
// harmless, and libkrun sends it late.
func (s *Session) setOwner(*message) error { return nil }

// resetOwner is deprecated; the specification leaves it to the back-end to ignore
// it, which keeps ring positions.
func (s *Session) resetOwner(*message) error { return nil }

func (s *Session) getProtocolFeatures(m *message) error {
	m.replyU64(uint64(s.offeredProtocol))
	return nil
}

func (s *Session) setProtocolFeatures(m *message) error {
	want := ProtocolFeatures(m.u64())
	if extra := want &^ s.offeredProtocol; extra != 0 {
		return fmt.Errorf("protocol features %v (%#x) are not offered, offered are %v", extra, uint64(extra), s.offeredProtocol)
	}
	s.protocol = want
	s.back.tellConfig(want&ProtoConfig != 0)
	return nil
}
