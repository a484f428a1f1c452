#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the guest kernel: Debian's linux-source package, our patches and a
# flavour's configuration fragments. A build is kept outside the tree, named by
# the hash of everything that went into it, so that an unchanged input is never
# built twice and an older kernel stays usable.
#
#   build.sh [--flavour F]   build, unless the cache has it
#   build.sh --path [F]      print where its vmlinux is; fails if not built yet
#   build.sh --report [F]    sizes, initcalls and the boot's time; see report.py
#
# The cache: ${MAYFLY_CACHE:-/var/cache/mayfly, or ~/.cache/mayfly}/kernel/.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
package=linux-source-6.1
tarball=/usr/src/$package.tar.xz

die() {
    echo "kernel: $*" >&2
    exit 125
}

usage() {
    sed -n 's/^#   //p' "$here/build.sh" >&2
    exit 2
}

action=build flavour=micro
while [ $# -gt 0 ]; do
    case $1 in
    --flavour) [ $# -ge 2 ] || usage; flavour=$2; shift ;;
    --path | --report)
        action=${1#--}
        case ${2:-} in '' | -*) ;; *) flavour=$2; shift ;; esac ;;
    *) usage ;;
    esac
    shift
done
case $flavour in *[!a-z0-9]*) usage ;; esac
[ -f "$here/flavours/$flavour" ] || die "no flavour '$flavour' in $here/flavours"

version=$(dpkg-query -W -f '${Version}' $package 2>/dev/null) && [ -f $tarball ] ||
    die "$package is not installed; run: apt-get install --no-install-recommends $package"
for tool in gcc ld bison flex bc; do
    command -v $tool >/dev/null ||
        die "$tool is not installed; run: apt-get install --no-install-recommends gcc binutils bison flex bc libelf-dev libssl-dev"
done

# Fragments in the flavour's order, and patches in the order of their names.
fragments=()
while read -r name; do
    [ -f "$here/fragments/$name.config" ] || die "flavours/$flavour: no fragment '$name'"
    fragments+=("$here/fragments/$name.config")
done < <(grep -v '^#' "$here/flavours/$flavour")
shopt -s nullglob
patches=("$here"/patches/*.patch)

# Comments in fragments are no input: rewording one builds nothing.
hash=$({
    echo "$package $version"
    gcc --version | head -n1
    ld --version | head -n1
    cat "$here/build.sh" "${patches[@]}"
    sed '/^#/d; /^$/d' "${fragments[@]}"
} | sha256sum | cut -c1-16)

if [ -n "${MAYFLY_CACHE:-}" ]; then
    cache=$MAYFLY_CACHE
elif [ "$(id -u)" = 0 ]; then
    cache=/var/cache/mayfly
else
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/mayfly
fi
cache=$cache/kernel
out=$cache/$flavour-$hash

case $action in
path)
    echo "$out/vmlinux"
    [ -f "$out/vmlinux" ] || die "$flavour is not built; run: make kernel"
    exit 0 ;;
report)
    [ -f "$out/vmlinux" ] || "$here/build.sh" --flavour "$flavour"
    exec python3 "$here/report.py" "$out" ;;
esac

if [ -f "$out/vmlinux" ]; then
    echo "kernel: $out/vmlinux (cached)"
    exit 0
fi

# One builder at a time; another waits here and may find its result. The lock
# also owns the temporary directory, so that what a killed build left is cleared.
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock -n 9 || {
    echo "kernel: waiting for another build in $cache"
    flock 9
}
if [ -f "$out/vmlinux" ]; then
    echo "kernel: $out/vmlinux (built meanwhile)"
    exit 0
fi

tmp=$cache/.tmp
child=
cleanup() {
    if [ -n "$child" ]; then
        kill -TERM -- "-$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    rm -rf "$tmp"
}
trap cleanup EXIT
trap 'echo; echo "kernel: interrupted" >&2; exit 130' INT
trap 'exit 143' TERM HUP
rm -rf "$tmp"
mkdir -p "$tmp/src" "$tmp/out"
log=$tmp/out/build.log
start=$SECONDS

# One line a stage; on a terminal it counts the files while they are built.
progress() {
    local line n=0 began=$SECONDS
    while IFS= read -r line; do
        echo "$line" >>"$log"
        n=$((n + 1))
        if [ -t 1 ]; then
            printf '\rkernel: %-12s %5d steps %4d s' "$1" $n $((SECONDS - began))
        fi
    done
    [ -t 1 ] && printf '\r'
    printf 'kernel: %-12s %5d steps %4d s\n' "$1" $n $((SECONDS - began))
}

# In the background, because a shell in wait handles signals at once, and in a
# process group of its own, so that all of it can be ended. The lock's
# descriptor stays here: a stray compiler must not hold it.
stage() {
    local label=$1 rc=0
    shift
    set -m
    { "$@" 2>&1 | progress "$label"; } 9>&- &
    child=$!
    set +m
    wait "$child" || rc=$?
    child=
    [ $rc = 0 ] && return
    echo "kernel: '$label' failed ($rc); the end of its log:" >&2
    tail -n 25 "$log" >&2
    cp "$log" "$cache/failed-$flavour.log"
    die "whole log: $cache/failed-$flavour.log"
}

# Kconfig and Makefiles stay everywhere; sources go where they cannot be built.
unpack() {
    local exclude=() dir
    for dir in sound samples rust tools/testing tools/perf \
        drivers/{gpu,media,staging,infiniband,usb,scsi,iio,soc,clk,crypto,mtd,misc,pinctrl,hwmon,video,platform,phy,mfd} \
        drivers/{net/ethernet,net/wireless} fs/{xfs,btrfs,ocfs2,nfs,nfsd,cifs}; do
        exclude+=(--exclude="$package/$dir/*.[chS]")
    done
    for dir in arm arm64 powerpc mips sh sparc m68k s390 riscv alpha ia64 xtensa \
        parisc um arc csky hexagon loongarch microblaze nios2 openrisc; do
        exclude+=(--exclude="$package/arch/$dir/*.[chS]" --exclude="$package/arch/$dir/*.dts*")
    done
    tar -xf $tarball -C "$tmp/src" --strip-components=1 -I 'xz -T0' \
        "${exclude[@]}" --exclude="$package/Documentation/*/*"
}

# Three are needed: for emulated ring 0, power-off and the clock. The others save time and do nothing
# else: one that another version of the source does not take, whole and without fuzz, is left out
# and named, so that an update of Debian's package costs milliseconds and not the build.
patch_all() {
    local p apply=(patch -d "$tmp/src" -p1 --fuzz=0 --batch --no-backup-if-mismatch)
    : >"$tmp/out/left-out"
    for p in "${patches[@]}"; do
        echo "patch ${p##*/}"
        case $p in
        */0001-* | */0018-* | */0020-*) ;;
        *)
            if ! "${apply[@]}" --dry-run -i "$p"; then
                echo "${p##*/}" >>"$tmp/out/left-out"
                continue
            fi
            ;;
        esac
        "${apply[@]}" -i "$p" || return
    done
}

kmake() {
    exec make -C "$tmp/src" -j"$(nproc)" ARCH=x86 \
        KBUILD_BUILD_USER=mayfly KBUILD_BUILD_HOST=mayfly KBUILD_BUILD_VERSION=1 \
        KBUILD_BUILD_TIMESTAMP="$flavour-$hash" "$@"
}

configure() {
    (kmake KCONFIG_ALLCONFIG="$tmp/asked" allnoconfig) && check_config
}

# Kconfig drops what it cannot satisfy without a word; we do not.
check_config() {
    local line name want got bad=0
    while IFS= read -r line; do
        name=${line%%=*} want=${line#*=}
        got=$(sed -n "s/^$name=//p" "$tmp/src/.config")
        if ! grep -qx "${name#CONFIG_}" "$tmp/kconfig-names"; then
            echo "$name: no such option in this source"
            bad=1
        elif [ "${got:-n}" != "$want" ]; then
            echo "$name: asked for $want, got ${got:-n}"
            bad=1
        fi
    done <"$tmp/asked"
    return $bad
}

stage unpack unpack
stage patch patch_all
while read -r name; do
    echo "kernel: $name does not apply to $package $version and is left out: the boot takes longer"
done <"$tmp/out/left-out"
# The last word on an option wins, as it does for Kconfig.
sed '/^#/d; /^$/d' "${fragments[@]}" | tac | awk -F= '!seen[$1]++' | tac >"$tmp/asked"
find "$tmp/src" -name 'Kconfig*' -exec sed -nE 's/^\s*(menu)?config //p' {} + >"$tmp/kconfig-names"
stage configure configure
stage compile kmake bzImage

src=$tmp/src
cp "$src/.config" "$tmp/out/config"
cp "$src/System.map" "$src/arch/x86/boot/bzImage" "$tmp/out/"
strip -s -o "$tmp/out/vmlinux" "$src/vmlinux"
readelf -n "$tmp/out/vmlinux" | grep -q 'Xen' || die "vmlinux has lost its PVH note"
mv -T "$tmp/out" "$out"
echo "kernel: $out/vmlinux ($(stat -c %s "$out/vmlinux") bytes, $((SECONDS - start)) s)"
