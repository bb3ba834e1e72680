package qemu

import (
	"fmt"
	"regexp"
	"strings"
)

const (
	// ID names the character device and the network back-end.
	ID = "vhostd0"
	// MemoryID names the guest's memory.
	MemoryID = "vhostd-mem0"
)

// Device describes the guest's network device and the way to the back-end.
type Device struct {
	// Socket is the path of the back-end's socket.
	Socket string
	// Listen makes QEMU listen on the socket, for a back-end that dials. Otherwise QEMU connects, and again each second if the back-end
	// has gone away.
	Listen bool
	// QueuePairs is the number of queue pairs; more than one need as many processors of the guest to be of use.
	QueuePairs int
	// MAC is the guest's address; empty for QEMU's choice, which is the same for every guest.
	MAC string
	// MTU is what the guest is told that the network carries in bytes; 0 tells nothing.
	MTU int
	// Emulated leaves MSI-X out: QEMU 7.2 crashes when a guest uses it together with vhost-user while the processor is emulated.
	Emulated bool
}

// Args are the options that connect the device to the back-end.
func (d Device) Args() []string {
	return append(d.netdev(), "-device", d.device())
}

func (d Device) netdev() []string {
	side := "reconnect=1"
	if d.Listen {
		side = "server=on,wait=off"
	}
	netdev := "vhost-user,id=" + ID + ",chardev=" + ID
	if d.QueuePairs > 1 {
		netdev += fmt.Sprint(",queues=", d.QueuePairs)
	}
	return []string{"-chardev", "socket,id=" + ID + ",path=" + escape(d.Socket) + "," + side, "-netdev", netdev}
}

func (d Device) device() string {
	text := "virtio-net-pci,netdev=" + ID
	if d.QueuePairs > 1 {
		text += ",mq=on"
	}
	switch {
	case d.Emulated:
		text += ",vectors=0"
	case d.QueuePairs > 1:
		text += fmt.Sprint(",vectors=", 2*d.QueuePairs+2) // a queue each, the control queue, changes of the configuration
	}
	if d.MAC != "" {
		text += ",mac=" + d.MAC
	}
	if d.MTU > 0 {
		text += fmt.Sprint(",host_mtu=", d.MTU)
	}
	return text
}

// Memory are the options that make the guest's memory one that a back-end can share. The size is that of -m, or "" for QEMU's default.
func Memory(size string) ([]string, error) {
	size, err := memorySize(size)
	if err != nil {
		return nil, err
	}
	return []string{
		"-object", "memory-backend-memfd,id=" + MemoryID + ",size=" + size + ",share=on",
		"-machine", "memory-backend=" + MemoryID,
	}, nil
}

// defaultMemory is what QEMU gives a guest without -m.
const defaultMemory = "128M"

var size = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?[bBkKmMgGtT]?$`)

// memorySize turns the size of -m, mebibytes where no unit is given, into that of an object, bytes where none is given.
func memorySize(text string) (string, error) {
	switch {
	case text == "":
		return defaultMemory, nil
	case !size.MatchString(text) || strings.Trim(text, "0.bBkKmMgGtT") == "":
		return "", fmt.Errorf("%q: accepted are sizes such as 512M and 2G", text)
	case strings.ContainsAny(text[len(text)-1:], "0123456789"):
		return text + "M", nil
	}
	return text, nil
}

// escape makes a value of an option of text: commas are doubled.
func escape(text string) string { return strings.ReplaceAll(text, ",", ",,") }

var plain = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// Quote makes one line of words for a POSIX shell, which reads the same words from it.
func Quote(words []string) string {
	quoted := make([]string, len(words))
	for i, word := range words {
		if quoted[i] = word; !plain.MatchString(word) {
			quoted[i] = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
	}
	return strings.Join(quoted, " ")
}
