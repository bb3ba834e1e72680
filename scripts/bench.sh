#!/bin/sh
# Compares vhostd with DPDK's own back-end behind the same front-end; arguments go to bench/dpdk_pair.py. Needs root.
# `bench.sh switch` measures the switch between two front-ends instead; arguments go to bench/switch.
# `bench.sh usernet` measures the user network against its peers; arguments go to bench/usernet.
set -eu

if [ "${1:-}" = switch ]; then
	shift
	exec go run ./bench/switch "$@"
fi
if [ "${1:-}" = usernet ]; then
	shift
	exec go run ./bench/usernet "$@"
fi

pages=/proc/sys/vm/nr_hugepages
before=$(cat "$pages")
mounted=
restore() {
	[ -z "$mounted" ] || umount /dev/hugepages
	echo "$before" >"$pages"
}
trap restore EXIT
[ "$before" -ge 1024 ] || echo 1024 >"$pages"
mkdir -p /dev/hugepages
if ! grep -q ' /dev/hugepages hugetlbfs ' /proc/mounts; then
	mount -t hugetlbfs none /dev/hugepages
	mounted=yes
fi
python3 bench/dpdk_pair.py --backend './bin/vhostd serve --socket {sock} --network {network} --wake poll --cpus 0' "$@"
