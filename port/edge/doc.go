// Package edge is what may stand between a guest and its network, whatever kind the network is: a guard against forged source
// addresses, rate limits and a capture. [Wrap] puts it around a port; the port does not know.
//
// It is one wrapper for three purposes, and not part of each port, because all of them see the same frames at the same place: the
// batch that a worker hands over. A port without any of them is not wrapped, so that others pay nothing.
//
// # Order
//
// What the guest sends is first judged by the guard, then paid for, then captured as it passes. What it receives is captured as it
// arrives. So the capture shows what crossed the border: refused frames are in the counters, not in the file.
//
// # Limits
//
// A guest over its rate is pushed back, as by any port that is full: its frames stay in its ring, and nothing is lost. The worker tries
// again after some milliseconds, for which the bucket's burst has room. Frames towards the guest wait where the network keeps them,
// as for a guest without buffers, until a timer ends the pause. A bucket may be shared by all queues of a guest, and by its ports.
//
// # Capture
//
// The file has frames as they would be on a wire: a checksum that the sender left to a device is finished in the copy, computed over the
// whole frame even if only its start is kept. A frame that stands for many segments stays one and has a comment that says so.
package edge
