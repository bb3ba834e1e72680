// Package driver is the driver side of a split virtqueue in shared memory
// (virtio 1.3 section 2.7): the half that a guest or a front-end plays. Tests,
// benchmarks and the namespace front-end use it.
//
// Chains are added, then shown to the device with Publish; NeedsKick says
// whether it wants a kick; GetUsed takes back what the device has used.
// Addresses in buffers are what the device is to see (guest physical
// addresses), the ring itself is given by host addresses of a mapping outside
// the Go heap. The Poke and Peek methods bypass all bookkeeping, for tests
// that play a broken or hostile driver.
//
// The device is not trusted either: bookkeeping is private, used entries are
// checked. A Ring has one owner and no locks.
package driver
