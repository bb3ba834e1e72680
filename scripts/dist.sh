#!/bin/bash
# Builds what is published: a Debian package and an archive for each architecture, and SHA256SUMS. Nothing of the machine gets into them:
# the same commit, Go and dpkg give the same bytes.
#
#   scripts/dist.sh [-o DIR] [ARCH…]      DIR is build/dist, ARCH amd64 and arm64, by their names in Debian and Go alike
#
# VERSION and SOURCE_DATE_EPOCH (seconds) stand for what git says; without a repository they must be given. MAINTAINER is who answers for the
# packages, "NAME <ADDRESS>": who gives them to others says so. DEB_COMPRESSION=none saves the time that xz takes.
set -euo pipefail
umask 022
export LC_ALL=C TZ=UTC
cd "$(dirname "$0")/.."

die() { echo "dist: $*" >&2; exit 1; }

out=build/dist
while getopts o: option; do
	case $option in
	o) out=$OPTARG ;;
	*) die "usage: scripts/dist.sh [-o DIR] [ARCH…]" ;;
	esac
done
shift $((OPTIND - 1))
archs=${*:-amd64 arm64}
for arch in $archs; do
	case $arch in amd64 | arm64) ;; *) die "$arch: accepted are amd64 and arm64" ;; esac
done
for tool in go dpkg-deb gzip tar sha256sum; do
	command -v $tool >/dev/null || die "needs $tool"
done

# described prints a version that is one for Go, Debian and file names: 1.2.3 at the tag v1.2.3, 1.2.3+5.gabc1234 five commits after it;
# 1.2.3~rc1 at v1.2.3-rc1, which Debian takes for older than 1.2.3.
described() {
	local text
	if ! text=$(git describe --tags --match 'v[0-9]*' --dirty --abbrev=12 2>/dev/null); then
		text=v0.0.0-$(git rev-list --count HEAD)-g$(git describe --always --exclude '*' --dirty --abbrev=12)
	fi
	sed -E 's/^v//; s/-([0-9]+)-g/+\1.g/; s/-dirty$/.dirty/; s/-/~/g' <<<"$text"
}

version=${VERSION:-$(described)} || die "no version: set VERSION, or build in the repository"
[[ $version =~ ^[0-9][0-9A-Za-z.+~]*$ ]] || die "version \"$version\": accepted are a digit and then letters, digits and .+~"
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
[[ $SOURCE_DATE_EPOCH =~ ^[0-9]+$ ]] || die "SOURCE_DATE_EPOCH \"$SOURCE_DATE_EPOCH\": accepted are seconds since 1970"

maintainer=${MAINTAINER:-vhostd maintainers <vhostd@users.noreply.github.com>}
word='[^[:cntrl:]<>@/&\]' # of it sed and Debian take every character as it is
[[ $maintainer =~ ^$word+' <'$word+@$word+'>'$ ]] || die "MAINTAINER \"$maintainer\": accepted is NAME <ADDRESS>"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

# put MODE SOURCE TARGET copies one file; squeeze SOURCE TARGET compresses it, without a name or time in it.
put() { install -D -m "$1" "$2" "$3"; }
squeeze() { install -d "$(dirname "$2")" && gzip -9 -n <"$1" >"$2" && chmod 644 "$2"; }

# build makes $work/ARCH/vhostd, once. What the caller's environment says about Go must not change it.
build() { # ARCH
	[ -e "$work/$1/vhostd" ] || GOOS=linux GOARCH=$1 GOAMD64=v1 GOARM64=v8.0 CGO_ENABLED=0 GOFLAGS= GOEXPERIMENT= \
		go build -trimpath -ldflags "-s -w -X main.version=$version" -o "$work/$1/vhostd" ./cmd/vhostd
}

# notices prints the licenses of all that is linked into a program; they ask for it.
notices() { # PROGRAM
	echo "vhostd is under the Apache License 2.0. Linked into it are the modules below, each with its own license."
	printf '\n==== Go standard library and runtime\n\n' && cat "$(go env GOROOT)/LICENSE"
	go version -m "$1" | awk '$1 == "dep" { print $2 "@" $3 }' | sort | while read -r module; do
		local dir texts
		dir=$(go list -m -f '{{.Dir}}' "${module%@*}")
		texts=$(find "$dir" -maxdepth 1 -type f -regextype posix-extended -iregex '.*/(LICEN[CS]E|COPYING|NOTICE|PATENTS)([.-][^/]*)?' | sort)
		[ -n "$texts" ] || die "$module has no license text"
		for text in $texts; do
			printf '\n==== %s %s\n\n' "$module" "${text##*/}" && cat "$text"
		done
	done
}

# common fills what all architectures share: manual pages and completions come from the program itself.
common() { # DIR
	local host
	host=$(go env GOHOSTARCH)
	build "$host"
	"$work/$host/vhostd" man "$work/man"
	for page in "$work"/man/*.8; do
		squeeze "$page" "$1/man/${page##*/}.gz"
	done
	install -d "$1/completions"
	for shell in bash zsh fish; do
		"$work/$host/vhostd" completion $shell >"$1/completions/vhostd.$shell"
	done
	notices "$work/$host/vhostd" >"$1/THIRD-PARTY-NOTICES"
	for file in LICENSE README.md CHANGELOG.md; do
		put 644 $file "$1/$file"
	done
	for file in $(cd docs && ls ./*.md); do
		put 644 "docs/$file" "$1/docs/$file"
	done
	for file in $(cd dist && find systemd sysusers.d vhost-user examples vhostd.yaml -type f | sort); do
		put 644 "dist/$file" "$1/$file"
	done
}

archive() { # ARCH
	local name=vhostd-$version-linux-$1
	cp -a "$work/common" "$work/$name"
	put 755 "$work/$1/vhostd" "$work/$name/vhostd"
	tar -C "$work" --sort=name --format=ustar --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -c "$name" |
		gzip -n >"$out/$name.tar.gz"
	names+=("$name.tar.gz")
}

# tree lays the files out as the package installs them.
tree() { # ARCH ROOT
	local from=$work/common doc=$2/usr/share/doc/vhostd file
	put 755 "$work/$1/vhostd" "$2/usr/bin/vhostd"
	for file in "$from"/man/*; do put 644 "$file" "$2/usr/share/man/man8/${file##*/}"; done
	put 644 "$from/completions/vhostd.bash" "$2/usr/share/bash-completion/completions/vhostd"
	put 644 "$from/completions/vhostd.zsh" "$2/usr/share/zsh/vendor-completions/_vhostd"
	put 644 "$from/completions/vhostd.fish" "$2/usr/share/fish/vendor_completions.d/vhostd.fish"
	for file in "$from"/systemd/*; do put 644 "$file" "$2/usr/lib/systemd/system/${file##*/}"; done
	put 644 "$from/sysusers.d/vhostd.conf" "$2/usr/lib/sysusers.d/vhostd.conf"
	put 644 "$from/vhost-user/50-vhostd.json" "$2/usr/share/qemu/vhost-user/50-vhostd.json"
	put 644 "$from/vhostd.yaml" "$2/etc/vhostd/vhostd.yaml"
	put 644 "$from/README.md" "$doc/README.md"
	put 644 "$from/examples/vm1.env" "$doc/examples/vm1.env"
	for file in "$from"/docs/*; do put 644 "$file" "$doc/docs/${file##*/}"; done
	put 644 dist/deb/copyright "$doc/copyright"
	squeeze "$from/THIRD-PARTY-NOTICES" "$doc/third-party-notices.gz"
	squeeze "$from/CHANGELOG.md" "$doc/changelog.gz"
	printf 'vhostd (%s-1) unstable; urgency=medium\n\n  * What is new: changelog.gz beside this file.\n\n -- %s  %s\n' "$version" \
		"$maintainer" "$(date -R -d "@$SOURCE_DATE_EPOCH")" >"$work/changelog"
	squeeze "$work/changelog" "$doc/changelog.Debian.gz"
	put 644 dist/deb/lintian-overrides "$2/usr/share/lintian/overrides/vhostd"
}

package() { # ARCH
	local root=$work/deb-$1 name=vhostd_$version-1_$1.deb script
	tree "$1" "$root"
	install -d "$root/DEBIAN"
	(cd "$root" && find etc usr -type f | sort | xargs md5sum) >"$work/md5sums"
	sed -e "s/@VERSION@/$version-1/" -e "s/@ARCH@/$1/" -e "s/@MAINTAINER@/$maintainer/" -e "s/@SIZE@/$(du -k -s --apparent-size --exclude=DEBIAN "$root" | cut -f1)/" \
		dist/deb/control.in >"$work/control"
	put 644 "$work/control" "$root/DEBIAN/control"
	put 644 "$work/md5sums" "$root/DEBIAN/md5sums"
	put 644 dist/deb/conffiles "$root/DEBIAN/conffiles"
	for script in postinst prerm postrm; do put 755 dist/deb/$script "$root/DEBIAN/$script"; done
	# One thread: what xz writes with more depends on their number.
	dpkg-deb --root-owner-group -Z"${DEB_COMPRESSION:-xz}" --threads-max=1 --build "$root" "$out/$name" >/dev/null
	names+=("$name")
}

names=()
common "$work/common"
for arch in $archs; do
	build "$arch"
	archive "$arch"
	package "$arch"
done
(cd "$out" && sha256sum "${names[@]}" | tee SHA256SUMS)
