// Package rig runs real front-ends against vhostd: QEMU guests under emulation with a Debian kernel and our own init, started
// directly or by libvirt, and DPDK's testpmd over virtio-user. The tests of package integration and `make demo` are written on it.
//
// What it needs comes from `make setup`: Debian's packages, and the kernel image unpacked below the cache folder. The environment can change where things are:
//
//	VHOSTD_CACHE   folder with the unpacked kernel; ~/.cache/vhostd by default
//	VHOSTD_BINARY  vhostd to test; built from this module by default
//	VHOSTD_RACE    1: the vhostd that is built has the race detector
//	VHOSTD_QEMU    QEMU program; qemu-system-x86_64 by default
//	VHOSTD_ACCEL   QEMU accelerator; tcg by default, since it works everywhere and the same way
//
// Namespaces are anonymous and belong to a thread of the test process, children die with that thread: whatever way the tests
// end, no process and no interface stays behind.
package rig
