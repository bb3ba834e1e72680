// Package user is the network behind a TCP/IP stack inside the process (gVisor netstack): guests reach the networks of the host
// through ordinary sockets, without privileges and without an interface of the host.
//
// # Who does what
//
// The port answers ARP and neighbor discovery itself, advertises the IPv6 prefix, and learns where guests are from what they send.
// TCP is terminated in the stack: a SYN is answered only after the host's own connect succeeded, what failed is told as a reset, as
// an ICMP error or by silence, and from then on bytes are copied between the stack's endpoint and the host's socket. UDP and echo
// requests pass without the stack, straight from the frame's fragments into a socket of the flow; only fragments of datagrams are
// put together by the stack. Answers are built here, in pieces where they are longer than the MTU.
//
// # Threads
//
// [Queue.Send] runs on the guest's worker and takes a frame through all of this without waiting for anything. One goroutine of the
// port, the poller, waits for all host sockets; a TCP connection has a goroutine only while it has bytes to copy. What is for the
// guest waits in the ring of one of the port's queues, at most ringFrames and all together at most ringBytes of a port; a full ring loses the frame,
// which the counters tell. The worker is rung once for whatever came while it slept.
//
// # Bounds
//
// Nothing a guest sends makes the process grow without bound: flows ([Options.MaxFlows]), descriptors (a share of the process's
// limit, see budget), connects under way, addresses learnt, memory of the stack's buffers. Where a new flow meets a cap, the oldest
// one-shot datagram flow or unanswered connect gives way, else the new one is refused. A panic ends this network alone,
// except on a processor of the stack (see docs/threat-model.md).
package user
