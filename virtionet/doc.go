// Package virtionet is the virtio-net device: it implements vhostuser.Device by
// moving frames between the virtqueues of a guest and the queues of a port.
//
// A [Device] belongs to one guest and outlives connections. Each queue pair is a
// worker task: the transmit path copies guest frames into a page-frag cache and
// hands them to the port, the receive path takes frames in pool pages from the
// port and copies them into guest buffers, both mirrored on vhost_net
// (drivers/vhost/net.c, handle_tx_copy and handle_rx).
//
// A batch is worked in two passes: descriptors are walked, judged and translated
// into a copy vector first; then one call copies everything, and one store
// publishes the used entries. Nothing here allocates per batch.
//
// Device methods are called by the session's goroutine; they reach a pair through
// its worker and return when the pair is quiescent.
package virtionet
