// Package vswitch is the network that joins guests of one process to one Ethernet segment: a learning switch whose ports are
// attachments like any other.
//
// # How frames cross
//
// The worker that sends looks up where a frame goes and puts it into the inbox of the receiving queue: a bounded queue with many
// producers and one consumer, without locks. Packets move by value, their pages stay where they are; a frame for several receivers is
// shared by reference count and nobody may change its bytes (package offload copies what it has to change). Offload marks and VLAN
// tags stay as they are. A receiver whose inbox is full loses the frame, counted at its port; a sender never waits. One
// port's frames never fill an inbox: they may be three times as many as there are places left.
//
// # Who gets a frame
//
// A frame for a known station goes to its port alone, all others go to every port but the one they came from: unknown stations and
// groups. A port gets a frame once, on the enabled queue that the frame's flow selects. A port without an enabled queue gets nothing,
// and frames for stations behind it go to the uplink if there is one, since that is where the station may have moved, and to nobody
// else. Addresses that a bridge must not pass on (IEEE 802.1Q, table 8-1: 01:80:C2:00:00:00 to 0F, among them pause frames) stop here.
//
// # Which stations are known
//
// The source address of each frame is learnt, regardless of VLANs, in a table of fixed size and forgotten after the ageing time. Each
// port may have so many stations; in a crowded part of the table the port that uses most of its share gives way. A port with a pinned
// address sends from that address only, nobody else can send from it or become its owner, and unknown stations are not looked for
// behind it.
package vswitch
