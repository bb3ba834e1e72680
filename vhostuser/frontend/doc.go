// Package frontend is the front-end side of the vhost-user protocol for a
// virtio-net device: it connects to a back-end, owns guest memory and rings, and
// plays the driver. Tests, benchmarks and the namespace front-end use it.
//
// [Conn] is the message level: typed calls, and raw sends of anything for tests
// with bad input. [Client] is the device level: negotiate, share memory, start
// queue pairs, send and receive frames.
package frontend
