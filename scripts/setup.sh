#!/bin/sh
# Brings what the tests and the demo need: Debian packages that are missing, and the guest kernel, unpacked but not installed.
set -eu

cache=${VHOSTD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vhostd}

# program:package[,package…] of everything that is run by name; libvirt-daemon-system makes the user that libvirt's driver wants
wanted='qemu-system-x86_64:qemu-system-x86 dpdk-testpmd:dpdk-dev qemu-aarch64-static:qemu-user-static virt-qemu-run:libvirt-daemon-driver-qemu,libvirt-daemon-system systemd-analyze:systemd systemd-nspawn:systemd-container nsenter:util-linux man:man-db ip:iproute2 gcc:gcc'

missing=
for pair in $wanted; do
	command -v "${pair%%:*}" >/dev/null || missing="$missing $(echo "${pair##*:}" | tr , ' ')"
done

kernel=$(ls "$cache"/kernel/boot/vmlinuz-* 2>/dev/null | tail -n 1)
if [ -z "$missing" ] && [ -n "$kernel" ]; then
	exit 0
fi
command -v apt-get >/dev/null || { echo "setup: no apt-get here; install by hand:$missing and a guest kernel below $cache/kernel" >&2; exit 1; }

if [ -n "$missing" ]; then
	[ "$(id -u)" = 0 ] || { echo "setup: run as root, or install by hand: apt-get install$missing" >&2; exit 1; }
	echo "setup: installing$missing"
	apt-get update -qq
	export DEBIAN_FRONTEND=noninteractive
	apt-get install -y -qq --no-install-recommends $missing </dev/null >/dev/null
fi

if [ -z "$kernel" ]; then
	echo "setup: unpacking the guest kernel below $cache/kernel"
	mkdir -p "$cache"
	work=$(mktemp -d "$cache/kernel.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	[ -n "$missing" ] || apt-get update -qq || true
	package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends:/ { print $2; exit }')
	(cd "$work" && apt-get download -qq -o APT::Sandbox::User=root "$package" && dpkg-deb -x ./*.deb kernel)
	rm -rf "$cache/kernel"
	mv "$work/kernel" "$cache/kernel"
fi
