package virtionet

import (
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/virtio"
)

var testMAC = [6]byte{2, 0, 0, 0, 0, 1}

const allControl = controlFeatures | virtio.FNetMQ | fakeOffloads

func le(n int, v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v)[:n] }

// table is one part of a MAC filter table whose last address byte counts up.
func table(n int, first ...byte) []byte {
	b := le(4, uint64(n))
	for i := range n {
		b = append(append(b, first...), make([]byte, 4-len(first))...)
		b = append(b, byte(i>>8), byte(i))
	}
	return b
}

// TestCommandsJudged_B15_B16: what is done, what is refused, and that a refused command changes
// nothing. A command that is cut anywhere is refused, too.
func TestCommandsJudged_B15_B16(t *testing.T) {
	pinned := errors.New("pinned")
	rules := commandRules{acked: allControl, maxPairs: 4, maySend: func(mac [6]byte) error {
		if mac[5] == 66 {
			return pinned
		}
		return nil
	}}
	for _, test := range []struct {
		name           string
		class, command byte
		data           []byte
		size           int // bytes that it needs, -1: it is refused at any length
	}{
		{"promiscuous off", virtio.CtrlRX, virtio.CtrlRXPromisc, []byte{0}, 1},
		{"all multicast", virtio.CtrlRX, virtio.CtrlRXAllMulti, []byte{1}, 1},
		{"all unicast", virtio.CtrlRX, virtio.CtrlRXAllUni, []byte{1}, 1},
		{"no multicast", virtio.CtrlRX, virtio.CtrlRXNoMulti, []byte{1}, 1},
		{"no unicast", virtio.CtrlRX, virtio.CtrlRXNoUni, []byte{1}, 1},
		{"no broadcast", virtio.CtrlRX, virtio.CtrlRXNoBcast, []byte{255}, 1},
		{"unknown mode", virtio.CtrlRX, 6, []byte{1}, -1},
		{"address", virtio.CtrlMAC, virtio.CtrlMACAddrSet, []byte{2, 0, 0, 0, 0, 9}, 6},
		{"zero address", virtio.CtrlMAC, virtio.CtrlMACAddrSet, make([]byte, 6), -1},
		{"group address", virtio.CtrlMAC, virtio.CtrlMACAddrSet, []byte{3, 0, 0, 0, 0, 9}, -1},
		{"address of another", virtio.CtrlMAC, virtio.CtrlMACAddrSet, []byte{2, 0, 0, 0, 0, 66}, -1},
		{"tables", virtio.CtrlMAC, virtio.CtrlMACTableSet, slices.Concat(table(2, 2), table(3, 1)), 4 + 12 + 4 + 18},
		{"empty tables", virtio.CtrlMAC, virtio.CtrlMACTableSet, make([]byte, 8), 8},
		{"count of 2^32-1", virtio.CtrlMAC, virtio.CtrlMACTableSet, slices.Concat(le(4, 1<<32-1), make([]byte, 600)), -1},
		{"second count too large", virtio.CtrlMAC, virtio.CtrlMACTableSet, slices.Concat(table(1, 2), le(4, 2), make([]byte, 8)), -1},
		{"unknown MAC command", virtio.CtrlMAC, 2, make([]byte, 64), -1},
		{"VLAN", virtio.CtrlVLAN, virtio.CtrlVLANAdd, le(2, 4095), 2},
		{"VLAN 4096", virtio.CtrlVLAN, virtio.CtrlVLANAdd, le(2, 4096), -1},
		{"VLAN gone", virtio.CtrlVLAN, virtio.CtrlVLANDel, le(2, 7), 2},
		{"announcement", 3, 0, nil, -1},
		{"pairs", virtio.CtrlMQ, virtio.CtrlMQPairsSet, le(2, 4), 2},
		{"no pairs", virtio.CtrlMQ, virtio.CtrlMQPairsSet, le(2, 0), -1},
		{"too many pairs", virtio.CtrlMQ, virtio.CtrlMQPairsSet, le(2, 5), -1},
		{"32768 pairs", virtio.CtrlMQ, virtio.CtrlMQPairsSet, le(2, 0x8000), -1},
		{"B24: RSS", virtio.CtrlMQ, 1, make([]byte, 64), -1},
		{"offloads", virtio.CtrlOffloads, virtio.CtrlOffloadsSet, le(8, uint64(virtio.FNetGuestCSum)), 8},
		{"offloads that were not acknowledged", virtio.CtrlOffloads, virtio.CtrlOffloadsSet, le(8, uint64(virtio.FNetGuestUFO)), -1},
		{"other features", virtio.CtrlOffloads, virtio.CtrlOffloadsSet, le(8, uint64(virtio.FNetMQ)), -1},
		{"unknown class", 6, 0, make([]byte, 64), -1},
		{"last class", 255, 255, make([]byte, 64), -1},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := append([]byte{test.class, test.command}, test.data...)
			for n := range len(cmd) + 1 {
				for _, extra := range []int{0, 3} {
					s := newDriverState(testMAC)
					s.off, s.uni = virtio.FNetGuestTSO4, addressTable{overflow: true}
					before := s
					in := slices.Concat(cmd[:n], make([]byte, extra*(n/len(cmd))))
					err := s.execute(in[:len(in):len(in)], rules)
					if ok := test.size >= 0 && n >= 2+test.size; (err == nil) != ok {
						t.Fatalf("%d of %d bytes: %v", n, len(cmd), err)
					}
					if err != nil && !sameState(&s, &before) {
						t.Fatalf("%d bytes: refused, but the state changed to %+v", n, s)
					}
				}
			}
			s := newDriverState(testMAC)
			if err := s.execute(cmd, commandRules{maxPairs: 4}); err == nil {
				t.Error("accepted without any feature")
			}
		})
	}
}

func sameState(a, b *driverState) bool {
	x, y := *a, *b
	if len(x.uni.set) != len(y.uni.set) || len(x.multi.set) != len(y.multi.set) ||
		x.uni.overflow != y.uni.overflow || x.multi.overflow != y.multi.overflow {
		return false
	}
	x.uni, x.multi, y.uni, y.multi = addressTable{}, addressTable{}, addressTable{}, addressTable{}
	return x.mac == y.mac && x.pairs == y.pairs && x.off == y.off && x.vlans == y.vlans && x.promisc == y.promisc &&
		x.allMulti == y.allMulti && x.allUni == y.allUni && x.noMulti == y.noMulti && x.noUni == y.noUni && x.noBcast == y.noBcast
}

func TestOffloadsNeedChecksums(t *testing.T) {
	s := newDriverState(testMAC)
	rules := commandRules{acked: allControl, maxPairs: 1}
	if err := s.execute(append([]byte{5, 0}, le(8, uint64(virtio.FNetGuestTSO4))...), rules); err != nil {
		t.Fatal(err)
	}
	if want := virtio.GuestOffloads & fakeOffloads; s.off != want {
		t.Errorf("switched off are %v, want %v", s.off, want)
	}
}

// TestRxFilter is what QEMU's receive_filter lets through (hw/net/virtio-net.c).
func TestRxFilter(t *testing.T) {
	own, other := []byte{2, 0, 0, 0, 0, 1}, []byte{2, 0, 0, 0, 0, 2}
	group, all := []byte{1, 0, 0x5e, 0, 0, 1}, []byte{255, 255, 255, 255, 255, 255}
	frame := func(dst []byte, vlan int) []byte {
		b := append(slices.Clone(dst), 2, 0, 0, 0, 0, 7)
		if vlan >= 0 {
			return append(b, 0x81, 0, byte(vlan>>8)|0xe0, byte(vlan), 8, 0)
		}
		return append(b, 8, 0, 0x45, 0)
	}
	quiet := func(s *driverState) { s.promisc = false }
	for _, test := range []struct {
		name  string
		edit  func(*driverState)
		acked virtio.Features
		frame []byte
		want  bool
	}{
		{"begins promiscuous", func(*driverState) {}, allControl, frame(other, 5), true},
		{"own address", quiet, allControl, frame(own, -1), true},
		{"other address", quiet, allControl, frame(other, -1), false},
		{"all unicast", func(s *driverState) { quiet(s); s.allUni = true }, allControl, frame(other, -1), true},
		{"no unicast", func(s *driverState) { quiet(s); s.noUni = true }, allControl, frame(own, -1), false},
		{"in the table", func(s *driverState) { quiet(s); s.uni.set = map[uint64]struct{}{address(other): {}} }, allControl, frame(other, -1), true},
		{"table overflowed", func(s *driverState) { quiet(s); s.uni.overflow = true }, allControl, frame(other, -1), true},
		{"address unknown", func(s *driverState) { quiet(s); s.mac = [6]byte{} }, allControl, frame(other, -1), true},
		{"multicast", quiet, allControl, frame(group, -1), false},
		{"all multicast", func(s *driverState) { quiet(s); s.allMulti = true }, allControl, frame(group, -1), true},
		{"multicast in the table", func(s *driverState) { quiet(s); s.multi.set = map[uint64]struct{}{address(group): {}} }, allControl, frame(group, -1), true},
		{"no multicast", func(s *driverState) { quiet(s); s.allMulti, s.noMulti = true, true }, allControl, frame(group, -1), false},
		{"broadcast", quiet, allControl, frame(all, -1), true},
		{"no broadcast", func(s *driverState) { quiet(s); s.noBcast = true }, allControl, frame(all, -1), false},
		{"VLAN unknown", quiet, allControl, frame(own, 5), false},
		{"VLAN known", func(s *driverState) { quiet(s); s.vlans[0] = 1 << 5 }, allControl, frame(own, 5), true},
		{"VLAN 4095 known", func(s *driverState) { quiet(s); s.vlans[63] = 1 << 63 }, allControl, frame(own, 4095), true},
		{"VLANs alone", func(*driverState) {}, virtio.FNetCtrlVLAN, frame(other, 5), false},
		{"VLANs alone, untagged", func(*driverState) {}, virtio.FNetCtrlVLAN, frame(other, -1), true},
		{"no VLAN feature", quiet, virtio.FNetCtrlRX, frame(own, 5), true},
		{"nothing acknowledged", quiet, 0, frame(other, 5), true},
		{"a runt", quiet, allControl, own, true},
		{"tag cut", func(s *driverState) { quiet(s); s.vlans[0] = 0 }, allControl, frame(own, 5)[:15], true},
	} {
		s := newDriverState(testMAC)
		test.edit(&s)
		f := newRxFilter(&s, test.acked)
		if got := f == nil || f.wants(test.frame); got != test.want {
			t.Errorf("%s: %v", test.name, got)
		}
	}
}

// TestCommandsModel plays random commands against the plainest record of them.
func TestCommandsModel(t *testing.T) {
	rules := commandRules{acked: allControl, maxPairs: 8}
	rapid.Check(t, func(rt *rapid.T) {
		s, pairs := newDriverState(testMAC), 1
		vlans, known := map[uint16]bool{}, map[[6]byte]bool{}
		mac, overflow := testMAC, false
		for range rapid.IntRange(1, 30).Draw(rt, "commands") {
			switch rapid.IntRange(0, 3).Draw(rt, "kind") {
			case 0:
				n := rapid.IntRange(0, 10).Draw(rt, "pairs")
				if err := s.execute(append([]byte{4, 0}, le(2, uint64(n))...), rules); (err == nil) != (n >= 1 && n <= 8) {
					rt.Fatalf("%d pairs: %v", n, err)
				} else if err == nil {
					pairs = n
				}
			case 1:
				id, on := rapid.Uint16Range(0, 4200).Draw(rt, "vlan"), rapid.Bool().Draw(rt, "on")
				cmd := append([]byte{2, 1}, le(2, uint64(id))...)
				if on {
					cmd[1] = 0
				}
				if err := s.execute(cmd, rules); (err == nil) != (id < 4096) {
					rt.Fatalf("VLAN %d: %v", id, err)
				} else if err == nil {
					vlans[id] = on
				}
			case 2:
				n := rapid.IntRange(0, 80).Draw(rt, "addresses")
				if err := s.execute(slices.Concat([]byte{1, 0}, table(n, 2, 9), table(0)), rules); err != nil {
					rt.Fatal(err)
				}
				clear(known)
				for i := range n {
					known[[6]byte{2, 9, 0, 0, 0, byte(i)}] = true
				}
				overflow = n > maxAddresses
			case 3:
				mac[5] = rapid.Byte().Draw(rt, "address")
				if err := s.execute(append([]byte{1, 1}, mac[:]...), rules); err != nil {
					rt.Fatal(err)
				}
			}
		}
		if s.pairs != pairs || s.mac != mac {
			rt.Fatalf("%d pairs, address %x, want %d and %x", s.pairs, s.mac, pairs, mac)
		}
		s.promisc = false
		f := newRxFilter(&s, allControl)
		dst := [6]byte{2, 9, 0, 0, 0, rapid.Byte().Draw(rt, "to")}
		id := rapid.Uint16Range(0, 4095).Draw(rt, "tag")
		frame := append(slices.Clone(dst[:]), 2, 0, 0, 0, 0, 7, 0x81, 0, byte(id>>8), byte(id), 8, 0)
		if want := vlans[id] && (overflow || known[dst]); f.wants(frame) != want {
			rt.Fatalf("a frame to %x in VLAN %d: wanted %v", dst, id, !want)
		}
	})
}

// FuzzCommand: no command may read beyond its bytes, leave a state out of range, or change
// anything when it is refused.
func FuzzCommand(f *testing.F) {
	f.Add([]byte{0, 0, 1}, uint64(allControl))
	f.Add(append([]byte{1, 1}, testMAC[:]...), uint64(allControl))
	f.Add(slices.Concat([]byte{1, 0}, table(70, 2), table(2, 1)), uint64(allControl))
	f.Add([]byte{1, 0, 255, 255, 255, 255}, uint64(allControl))
	f.Add([]byte{2, 0, 255, 15}, uint64(allControl))
	f.Add([]byte{4, 0, 3, 0}, uint64(allControl))
	f.Add([]byte{5, 0, 2, 0, 0, 0, 0, 0, 0, 0}, uint64(allControl))
	f.Fuzz(func(t *testing.T, cmd []byte, acked uint64) {
		s := newDriverState(testMAC)
		before := s
		rules := commandRules{acked: virtio.Features(acked), maxPairs: 4}
		err := s.execute(cmd[:len(cmd):len(cmd)], rules)
		if err != nil && !sameState(&s, &before) {
			t.Fatalf("refused with %v, but changed to %+v", err, s)
		}
		if s.pairs < 1 || s.pairs > 4 || s.off&^(rules.acked&virtio.GuestOffloads) != 0 || len(s.uni.set) > maxAddresses || len(s.multi.set) > maxAddresses {
			t.Fatalf("impossible state %+v", s)
		}
		if filter := newRxFilter(&s, rules.acked); filter != nil {
			filter.wants(cmd)
		}
	})
}
