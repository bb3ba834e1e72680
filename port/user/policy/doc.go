// Package policy decides where a guest of the user-mode network may connect and which names it may look up.
//
// # Rules
//
// A rule allows or denies a CIDR, a CIDR with one port, a DNS name, or all names below one (`*.example.com`, at any depth, without
// example.com itself). Rules are tried in the order in which they were given, the first that matches decides. If none does, the
// destination is allowed, unless there is an allow rule: then it is denied. A rule with a port says nothing about traffic without
// ports (ping).
//
// Before all rules stand built-in denies: cloud metadata services, the host's loopback and unspecified addresses, link-local
// networks, each also in the guises in which IPv6 can carry an IPv4 address. An allow rule lifts a built-in deny only if it is at
// least as specific: `allow=0.0.0.0/0` does not open 169.254.169.254, `allow=169.254.169.254` does. Lifted, the destination goes
// through the rules like any other.
//
// # Names
//
// A name stands for the addresses that our DNS forwarder answered for it to the very guest that connects, for the answer's TTL or
// [MinNameLife], whichever is longer. A flow is judged once, when it begins, and lasts as long as it lasts. What a guest knows
// from elsewhere is an address without a name. An allow rule counts only for the name that was asked for; a deny rule also for the
// names that the answer's aliases (CNAME) led through, because an alias can be made by anyone.
//
// Names filter look-ups too. A look-up is decided by the first rule with a matching name. Without one it is allowed if there is
// no allow rule, refused if all allow rules are names, and otherwise answered with those addresses that an address rule may let
// the guest reach.
//
// Destinations are given as the guest sent them: a connection to the gateway that is mapped to the host's loopback is judged as the
// gateway's address, so the loopback mapping needs no rule and opens nothing else.
package policy
