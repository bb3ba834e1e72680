// Package nettest drives a vhost-user network back-end with numbered frames and checks every byte of what arrives: the kernel's
// tools/virtio/vhost_net_test.c, for vhost-user.
//
// One thread plays the guest, the driver of the rings, and the wire, which is what is on the other side of the back-end: a second
// guest on the same switch ([Pair]), a peer of a socket network ([Sock]), a packet socket at a tap ([Tap]), or the guest itself where
// the back-end returns frames ([Reflect], and any back-end that loops). The back-end runs in a process of its own, or in this one.
//
// The back-end is not trusted: buffers are poisoned before they are posted, what lies around and behind a frame must stay as it was,
// and a source buffer is overwritten as soon as the back-end says that it is used.
package nettest
