// Package cases drives the real program, built with the race detector, through the faults that other back-ends had. A scripted
// front-end stands for the VM: it owns the socket, guest memory, rings and eventfds, so every wrong message and every wrong ring
// can be made. docs/testing.md lists which test belongs to which case.
//
//	go test ./integration/cases                    about four minutes on two cores
//	VHOSTD_LONG=1 go test -timeout 1h ./integration/cases
package cases
