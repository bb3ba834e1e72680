// Package virtio holds the numbers of the virtio specification that a network
// device needs: feature bits, the per-packet header and the configuration
// space, with their codecs and their validation.
//
// Nothing here touches shared memory: callers copy bytes out first and hand
// the private copy in. All multi-byte fields are little endian (virtio 1.x,
// "5.1.4", "5.1.6").
package virtio
