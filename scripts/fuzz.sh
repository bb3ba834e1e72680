#!/bin/sh
# Runs every fuzz target of the module for the given number of seconds, as many at a time as there are processors.
set -eu

if [ "${1:-}" = one ]; then
	seconds=$2 folder=$3 target=$4
	log=$(mktemp)
	trap 'rm -f "$log"' EXIT
	fuzz() { go test -run '^$' -fuzz "^$target\$" -fuzztime "${seconds}s" -parallel 1 "$folder" >"$log" 2>&1; }
	# Go before 1.27 may report the end of the time as a failure (https://go.dev/issue/75804). A finding says more than that.
	only_deadline() {
		grep -q '^ *context deadline exceeded$' "$log" && ! grep -Eq 'Failing input|panic|fatal error|_test\.go:|hung|terminated' "$log"
	}
	echo "fuzz  $folder $target"
	fuzz || { only_deadline && fuzz; } || { cat "$log"; exit 255; } # 255 has xargs start no other
	exit
fi

seconds=${1:-10}
targets=$(git ls-files '*_test.go' | xargs grep -o '^func Fuzz[A-Za-z0-9_]*(' |
	sed -n 's|^\(.*\)/[^/]*:func \(Fuzz[A-Za-z0-9_]*\)($|./\1 \2|p')
count=$(echo "$targets" | wc -l)
echo "$targets" | xargs -P "$(nproc)" -L 1 "$0" one "$seconds"
echo "$count fuzz targets, $seconds s each, no failure"
