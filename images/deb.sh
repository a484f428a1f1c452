#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A Debian package of what `make install` installs: images/deb.sh VERSION FOLDER FILE.deb. The program is static, so
# that it depends on no library; the rest is what some verbs start.
set -eu
version=$1 root=$2 out=$3
size=$(du -sk "$root" | cut -f1)
mkdir -p "$root/DEBIAN" "$root/usr/share/doc/mayfly"
cp LICENSE "$root/usr/share/doc/mayfly/copyright"
cat >>"$root/usr/share/doc/mayfly/copyright" <<'END'

The guest kernels, lib/mayfly/vmlinux and lib/mayfly/standard/vmlinux, are Linux: GPL-2.0. They are built
from Debian's package linux-source-6.1 with the fragments and patches in kernel-config/ of mayfly's source.
END
cat >"$root/DEBIAN/control" <<END
Package: mayfly
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: mayfly <mayfly@localhost>
Section: admin
Priority: optional
Installed-Size: $size
Recommends: e2fsprogs, libarchive-tools, mmdebstrap, passt, uidmap
Description: disposable Linux machines, each with its own kernel
 A minimal KVM microVM monitor with its command and guest agent, for coding
 agents that are not trusted and for evaluation harnesses.
END
dpkg-deb --root-owner-group --build "$root" "$out" >/dev/null
echo "$out ($(stat -c %s "$out") bytes)"
