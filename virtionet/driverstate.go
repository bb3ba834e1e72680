package virtionet

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/virtio"
)

// maxCommand bounds the bytes of one command: a table of some 2,700 addresses.
const maxCommand = 16 << 10

// maxAddresses is how many addresses of either sort a receive filter looks up. With
// more it lets all of that sort through, as QEMU does (hw/net/virtio-net.c,
// MAC_TABLE_ENTRIES).
const maxAddresses = 64

// errShort is a command with less data than its class needs.
var errShort = errors.New("the command's data is too short")

// driverState is what a driver has told the device through a control queue. The
// receive filter begins promiscuous (section 5.1.6.5.1), the VLAN table empty.
type driverState struct {
	mac   [6]byte         // zero: not known
	pairs int             // that the driver uses
	off   virtio.Features // of virtio.GuestOffloads, those switched off

	promisc, allMulti, allUni, noMulti, noUni, noBcast bool
	uni, multi                                         addressTable
	vlans                                              [4096 / 64]uint64
}

// addressTable is the unicast or the multicast part of a MAC filter table.
type addressTable struct {
	set      map[uint64]struct{}
	overflow bool // more than are looked up
}

func newDriverState(mac [6]byte) driverState {
	return driverState{mac: mac, pairs: 1, promisc: true}
}

// commandRules are what a command is judged by.
type commandRules struct {
	acked    virtio.Features
	maxPairs int
	maySend  func(mac [6]byte) error // nil: any address
}

// execute carries out one command, which is a private copy. On error nothing is
// changed and the driver is told VIRTIO_NET_ERR.
func (s *driverState) execute(cmd []byte, rules commandRules) error {
	if len(cmd) < virtio.CtrlHdrLen {
		return errShort
	}
	class, command, data := cmd[0], cmd[1], cmd[virtio.CtrlHdrLen:]
	need, run := s.command(class, command)
	switch {
	case run == nil:
		return fmt.Errorf("class %d has no command %d here", class, command)
	case !rules.acked.Has(need):
		return fmt.Errorf("class %d, command %d needs %v, which was not acknowledged", class, command, need)
	}
	return run(data, rules)
}

// command finds a command and the feature that it needs.
func (s *driverState) command(class, command byte) (virtio.Features, func([]byte, commandRules) error) {
	switch [2]byte{class, command} {
	case [2]byte{virtio.CtrlMAC, virtio.CtrlMACTableSet}:
		return virtio.FNetCtrlRX, s.setTable
	case [2]byte{virtio.CtrlMAC, virtio.CtrlMACAddrSet}:
		return virtio.FNetCtrlMACAddr, s.setAddress
	case [2]byte{virtio.CtrlVLAN, virtio.CtrlVLANAdd}, [2]byte{virtio.CtrlVLAN, virtio.CtrlVLANDel}:
		return virtio.FNetCtrlVLAN, func(data []byte, _ commandRules) error { return s.setVLAN(data, command == virtio.CtrlVLANAdd) }
	case [2]byte{virtio.CtrlMQ, virtio.CtrlMQPairsSet}:
		return virtio.FNetMQ, s.setPairs
	case [2]byte{virtio.CtrlOffloads, virtio.CtrlOffloadsSet}:
		return virtio.FNetCtrlGuestOffloads, s.setOffloads
	}
	modes := [...]*bool{
		virtio.CtrlRXPromisc: &s.promisc, virtio.CtrlRXAllMulti: &s.allMulti, virtio.CtrlRXAllUni: &s.allUni,
		virtio.CtrlRXNoMulti: &s.noMulti, virtio.CtrlRXNoUni: &s.noUni, virtio.CtrlRXNoBcast: &s.noBcast,
	}
	if class != virtio.CtrlRX || int(command) >= len(modes) {
		return 0, nil
	}
	need := virtio.FNetCtrlRX
	if command > virtio.CtrlRXAllMulti {
		need = virtio.FNetCtrlRXExtra
	}
	return need, func(data []byte, _ commandRules) error { return setMode(modes[command], data) }
}

func setMode(mode *bool, data []byte) error {
	if len(data) < 1 {
		return errShort
	}
	*mode = data[0] != 0
	return nil
}

func (s *driverState) setAddress(data []byte, rules commandRules) error {
	if len(data) < len(s.mac) {
		return errShort
	}
	mac := [6]byte(data)
	if mac == ([6]byte{}) || mac[0]&1 != 0 {
		return fmt.Errorf("MAC address %x: a unicast address other than zero is needed", mac)
	}
	if rules.maySend != nil {
		if err := rules.maySend(mac); err != nil {
			return err
		}
	}
	s.mac = mac
	return nil
}

// setTable replaces both tables: each is a 32-bit count and its addresses.
func (s *driverState) setTable(data []byte, _ commandRules) error {
	uni, data, err := readTable(data)
	if err != nil {
		return err
	}
	multi, _, err := readTable(data)
	if err != nil {
		return err
	}
	s.uni, s.multi = uni, multi
	return nil
}

func readTable(data []byte) (t addressTable, rest []byte, err error) {
	if len(data) < 4 {
		return t, nil, errShort
	}
	n := uint64(binary.LittleEndian.Uint32(data))
	if data = data[4:]; n > uint64(len(data))/6 {
		return t, nil, errShort
	}
	list, rest := data[:6*n], data[6*n:]
	if t.overflow = n > maxAddresses; t.overflow || n == 0 {
		return t, rest, nil
	}
	t.set = make(map[uint64]struct{}, n)
	for ; len(list) > 0; list = list[6:] {
		t.set[address(list)] = struct{}{}
	}
	return t, rest, nil
}

// address is a MAC address as a key.
func address(b []byte) uint64 {
	return uint64(binary.BigEndian.Uint32(b))<<16 | uint64(binary.BigEndian.Uint16(b[4:]))
}

func (s *driverState) setVLAN(data []byte, on bool) error {
	if len(data) < 2 {
		return errShort
	}
	id := binary.LittleEndian.Uint16(data)
	if id > 4095 {
		return fmt.Errorf("VLAN %d, 0 to 4095 exist", id)
	}
	bit := uint64(1) << (id % 64)
	if s.vlans[id/64] &^= bit; on {
		s.vlans[id/64] |= bit
	}
	return nil
}

func (s *driverState) setPairs(data []byte, rules commandRules) error {
	if len(data) < 2 {
		return errShort
	}
	n := int(binary.LittleEndian.Uint16(data))
	if n < 1 || n > rules.maxPairs {
		return fmt.Errorf("%d queue pairs, 1 to %d are accepted", n, rules.maxPairs)
	}
	s.pairs = n
	return nil
}

func (s *driverState) setOffloads(data []byte, rules commandRules) error {
	if len(data) < 8 {
		return errShort
	}
	can := rules.acked & virtio.GuestOffloads
	want := virtio.Features(binary.LittleEndian.Uint64(data))
	if extra := want &^ can; extra != 0 {
		return fmt.Errorf("offloads %v were not acknowledged", extra)
	}
	if s.off = can &^ want; s.off.Has(virtio.FNetGuestCSum) {
		s.off = can // without it there is no segmentation offload either
	}
	return nil
}
