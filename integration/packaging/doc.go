// Package packaging tries what scripts/dist.sh builds: the files of the Debian package and the archive, and the units under a real
// systemd, which systemd-nspawn starts over a copy-on-write view of this machine. It needs root and Debian's tools.
package packaging
