// Package packet defines what travels between a queue pair and a port: one
// Ethernet frame as a private copy of its virtio-net header and a short list of
// fragments in arena pages.
//
// A Packet is a plain value. Whoever holds it owns one reference on the page of
// each of its fragments; handing the value over hands the references over, and
// the giver must not use it again. Fragment bytes may be seen by other holders
// of the same page, so only the one who allocated them and has not passed them
// on may write to them. Nothing in this package locks or allocates.
package packet
