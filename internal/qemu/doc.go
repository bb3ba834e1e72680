// Package qemu writes the options of a QEMU command line that connect a guest to a vhost-user back-end, and reads a command line for
// those that they must fit: memory, machine, accelerator, processors.
//
// The options are those of QEMU 7.2 (qemu(1)); later versions take them too. Everything here is pure text: nothing is started, and
// all functions may be called by any goroutine.
package qemu
