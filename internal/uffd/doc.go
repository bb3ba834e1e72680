// Package uffd populates memory that arrives by postcopy migration, in a process of its own.
//
// The vhost-user postcopy messages have the back-end hand a userfaultfd to the front-end. Such a
// descriptor is power over the address space that opened it: whoever has it may register any of its
// memory, hold up every thread that touches that memory, and choose the contents of pages that were not
// touched before (ioctl_userfaultfd(2)). So the process that serves guests never opens one. A [Helper]
// process does, maps the files of one guest's memory, and touches their pages on request. What a
// front-end does with the descriptor, or fails to do, stops that process alone, and ending it
// ends every fault that nobody answers.
//
// The serving process maps the same files without registering anything. It does not touch a page before
// the helper has it in the page cache, and thus never waits for one. It would not even for a page that the
// front-end removes again: it would find zeros.
package uffd
