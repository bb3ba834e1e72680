// Package dhcp gives guests of the user-mode network their addresses: a DHCPv4 server (RFC 2131), a DHCPv6 server (RFC 8415) and the
// content of router advertisements (RFC 4861). It works on the payloads of datagrams; who calls it owns sockets and frames.
//
// # Who gets which address
//
// A station is known by its Ethernet address alone. The client identifier is echoed and not looked at: a boot loader and the system
// that it starts, or two systems that take turns on one guest, get the same address, and a guest that makes up identifiers cannot use
// up the pool. The address in the message must be the one that the frame came from.
//
// An address is, in this order: the one pinned to the station's MAC; the one pinned to the host name that it sends, unless another
// station has it; the one that it had; the one that it asks for, if it is free; the first free one; the one that nobody has used
// for longest. Pinned addresses are never given to others.
//
// A server that is the only one on its link and has lost its memory (a daemon that was restarted) agrees to what a client says that
// it has, as long as nobody else has it. RFC 2131 wants silence there, which would cost the guest its connections.
//
// # Bounds
//
// A table holds at most [MaxLeases] leases, at most [maxDeclined] addresses are set aside as declined, and messages above
// [MaxMessage] bytes are refused before they are parsed: compressed names in DHCPv6 options expand to the square of their length.
package dhcp
