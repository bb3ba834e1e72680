// Package guestmem maps the memory that a front-end shares and translates the
// addresses that it and its guest use.
//
// A Table is immutable: a changed memory layout is a new Table, and the old
// one is closed once nobody uses it. A table that differs by one region shares the
// mappings of the others (With, Without). All methods but Close are safe for
// concurrent use; Close needs every user of the table to be quiescent.
//
// Two address spaces lead into a region: the guest's physical addresses (GPA),
// which descriptors carry, and the front-end's virtual addresses (UVA), which
// the vhost-user messages carry for rings. The result is a host address, a
// uintptr into a mapping outside the Go heap.
//
// A front-end can truncate its file at any time, and the next access then
// faults. Code that touches guest memory either runs under Table.Guard or has
// its own recover that asks AsFault and Table.Owns.
package guestmem
