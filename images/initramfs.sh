#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the default image: an uncompressed cpio archive with the agent as /init, busybox and a little
# /etc. The same inputs give the same bytes, whoever runs it; no device node is needed, since the
# kernel's built-in archive has /dev/console and the agent mounts the rest.
#
#   images/initramfs.sh OUT AGENT
set -eu
[ $# -eq 2 ] || { echo "usage: $0 OUT AGENT" >&2; exit 2; }
out=$1 agent=$2
busybox=$(command -v busybox) || { echo "$0: busybox is missing (package busybox-static)" >&2; exit 1; }
if LC_ALL=C grep -q -a '/lib.*/ld-linux' "$busybox"; then
	echo "$0: $busybox is not a static program (package busybox-static)" >&2
	exit 1
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
umask 022
# Merged, as everywhere now: one folder of programs, and the other names lead to it.
(cd "$root" && mkdir -p bin dev etc mnt proc root run sys tmp usr var && \
	ln -s bin sbin && ln -s ../bin usr/bin && ln -s ../bin usr/sbin && ln -s ../run var/run && \
	ln -s ../tmp var/tmp && chmod 0700 root && chmod 1777 tmp)
cp "$agent" "$root/init"
cp "$busybox" "$root/bin/busybox"
chmod 0755 "$root/init" "$root/bin/busybox"
applets=$("$busybox" --list | tr '\n' ' ')
# A link costs some 11,000 instructions of the guest's kernel to make, before the first program can
# run: names that scripts use have one, the rest of the applets are there as `busybox NAME` and, in
# busybox's shell, by name.
for applet in [ ash awk base64 basename bc bunzip2 bzcat cat chgrp chmod chown chroot clear cmp comm \
	cp cpio cut date dd df diff dirname dmesg du echo egrep env expand expr fallocate false fgrep \
	find fold free getopt grep groups gunzip gzip halt head hexdump hostname id ifconfig install \
	ip kill killall less link ln ls md5sum mkdir mkfifo mknod mktemp more mount mv nc netstat nice \
	nl nohup nproc nslookup od paste patch pgrep pidof ping pkill poweroff printf ps pwd readlink \
	realpath reboot renice rev rm rmdir sed seq setsid sh sha1sum sha256sum sha512sum shuf sleep \
	sort stat strings stty su sync sysctl tac tail tar tee telnet test time timeout top touch tr \
	true truncate tty umount uname unexpand uniq unlink unshare unxz unzip uptime vi watch wc \
	wget which who whoami xargs xxd xz xzcat yes zcat; do
	case " $applets " in *" $applet "*) ln -s busybox "$root/bin/$applet" ;; esac
done

cat >"$root/etc/passwd" <<'EOF'
root:x:0:0:root:/root:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/false
EOF
cat >"$root/etc/group" <<'EOF'
root:x:0:
tty:x:5:
nogroup:x:65534:
EOF
cat >"$root/etc/hosts" <<'EOF'
127.0.0.1	localhost
::1	localhost
EOF
cat >"$root/etc/profile" <<'EOF'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
PS1='\u@\h:\w\$ '
EOF

find "$root" -exec touch -h -d @0 {} +
(cd "$root" && find . -mindepth 1 | LC_ALL=C sort | sed 's|^\./||' | \
	cpio --quiet -o -H newc --reproducible -R 0:0) >"$out.tmp"
mv "$out.tmp" "$out"
