// Package vhostuser is the back-end side of the vhost-user protocol for a
// virtio-net device: one [Session] serves one connection of a front-end (QEMU,
// cloud-hypervisor, DPDK virtio-user) and drives a [Device].
//
// The protocol is docs/interop/vhost-user.rst of QEMU. A session reads one
// message at a time, looks it up in a table that states its payload, its file
// descriptors, its reply and the protocol feature it needs, and calls a small
// handler. Consequences of bad input: a message that is well framed but not
// acceptable is answered with a non-zero acknowledgement when the front-end asked
// for one (or logged once) and changes nothing; a stream that cannot be parsed
// or an obligatory reply that cannot be given ends the connection. Every file
// descriptor that is received has one owner and is closed on every path.
//
// # Rings
//
// Two states of a ring are independent: started (by SET_VRING_KICK, until
// GET_VRING_BASE or RESET_DEVICE) and enabled (by SET_VRING_ENABLE). A ring starts as soon as
// SET_FEATURES, its size, its addresses, its kick descriptor and a memory table
// that holds it are all there, in any order.
//
// GET_QUEUE_NUM answers the number of virtqueues with the control queue, because
// crosvm and libkrun make exactly so many; cloud-hypervisor wants no less than it
// has data rings. QEMU compares the answer with queue pairs, so twice as many rings
// (at most [MaxSessionRings]) are accepted. Which of them may start follows the
// acknowledged features: without VIRTIO_NET_F_MQ rings 0 and 1 only. With
// VIRTIO_NET_F_CTRL_VQ the ring behind the data rings is the control queue, index
// MaxRings with MQ and 2 without (virtio 1.2 section 5.1.2), and no ring behind it
// starts. Front-ends that serve the control queue themselves do not pass it (QEMU
// does not acknowledge the feature to the back-end, cloud-hypervisor never uses
// more rings than were answered).
//
// A ring needs a kick descriptor: the form of SET_VRING_KICK without one, which
// asks the back-end to poll, is refused.
//
// A running ring refuses another size, base or address. libkrun however resets a
// device with SET_VRING_ENABLE 0 only, and then configures the rings again:
// configuring a started but disabled ring stops it first, as GET_VRING_BASE would.
package vhostuser
