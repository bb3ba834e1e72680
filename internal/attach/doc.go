// Package attach is a front-end without a virtual machine: it gives a network namespace an interface whose other end is a
// vhost-user back-end.
//
// The interface is a tap. One worker a queue pair moves frames between a queue of the tap and the driver's side of two rings,
// in memory that this process owns and shares: what the namespace sends is read from the tap into a ring's buffer, and what the
// back-end delivered is written to the tap from it, so that each frame is copied by the kernel alone.
//
// # Processes
//
// The tap is made by a helper, which runs in the namespace (see [RunHelper]): a process with several threads cannot enter a
// user namespace, and most namespaces of ordinary users belong to one. The helper hands over the tap's descriptors. It stays
// only for DHCP.
//
// # Who is not trusted
//
// The back-end may write anything into the shared memory at any time, say anything on the socket, or nothing. Ids and lengths of used
// buffers are judged, headers are judged in a private copy; the memory's file is sealed, so that it cannot shrink; every wait has a
// limit. A ring that cannot be, or a broken protocol, ends the connection, and with it [Run] unless Options.Reconnect is set. After a
// reconnection memory and rings are new ones, which the back-end before does not have.
package attach
