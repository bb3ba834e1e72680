// Package integration has the tests with real front-ends: QEMU guests with a Debian kernel, and DPDK's virtio-user. The harness is
// package rig, the guest's side package guest.
//
// They need root and what `make setup` brings; without, each test says why it is skipped, and in CI that is a failure.
//
//	make setup && go test -v ./integration        about five minutes on two cores
//	VHOSTD_LONG=1 go test -v -timeout 90m ./integration
package integration
