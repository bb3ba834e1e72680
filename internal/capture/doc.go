// Package capture writes frames to pcapng files without ever making who hands them over wait.
//
// Each queue has a [Ring] of its own, which its worker fills and the [Writer]'s goroutine empties into the file. A full ring loses
// frames, counted, and the next frame in the file says how many. Nothing is allocated for a frame, and no lock is taken.
//
// Rotation goes round a fixed set of files that are all open from the start: PATH, PATH.1 and so on; a file that is full is followed by
// the oldest one, which is emptied. Nothing has to be created or renamed while the process runs, so it works in a sandbox that allows
// neither.
//
// The package knows frames as bytes and imports nothing of this module; port/edge is who feeds it.
package capture
