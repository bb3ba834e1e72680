#!/bin/sh
# Runs every fuzz target of the module for the given number of seconds, as many at a time as there are processors.
# A folder's targets share one test program.
set -eu

program() { echo "$FUZZ_PROGRAMS/$(echo "$1" | tr / _)"; }

case ${1:-} in
build)
	go test -vet=off -c -fuzz . -o "$(program "$2")" "$2" || exit 255 # has xargs start no other
	exit
	;;
one)
	seconds=$2 folder=$3 target=$4
	log=$(mktemp "$FUZZ_PROGRAMS/log.XXXXXX")
	# As go test runs it, and with the same folder for the inputs that it keeps.
	fuzz() {
		(cd "$folder" && "$(program "$folder")" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "${seconds}s" -test.parallel 1 \
			-test.fuzzcachedir "$FUZZ_CACHE/${folder#./}" -test.paniconexit0) >"$log" 2>&1
	}
	# Go before 1.27 may report the end of the time as a failure (https://go.dev/issue/75804). A finding says more than that.
	only_deadline() {
		grep -q '^ *context deadline exceeded$' "$log" && ! grep -Eq 'Failing input|panic|fatal error|_test\.go:|hung|terminated' "$log"
	}
	echo "fuzz  $folder $target"
	fuzz || { only_deadline && fuzz; } || { cat "$log"; exit 255; }
	exit
	;;
esac

seconds=${1:-10}
FUZZ_PROGRAMS=$(mktemp -d)
trap 'rm -rf "$FUZZ_PROGRAMS"' EXIT
FUZZ_CACHE=$(go env GOCACHE)/fuzz/$(go list -m)
export FUZZ_PROGRAMS FUZZ_CACHE
targets=$(git ls-files '*_test.go' | xargs grep -o '^func Fuzz[A-Za-z0-9_]*(' |
	sed -n 's|^\(.*\)/[^/]*:func \(Fuzz[A-Za-z0-9_]*\)($|./\1 \2|p')
count=$(echo "$targets" | wc -l)
echo "$targets" | cut -d ' ' -f 1 | sort -u | xargs -P "$(nproc)" -L 1 "$0" build
echo "$targets" | xargs -P "$(nproc)" -L 1 "$0" one "$seconds"
echo "$count fuzz targets, $seconds s each, no failure"
