# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Images: imported, hostile ones too, and as the root of a real guest.
. "$(dirname "$0")/lib.sh"

# --- A container's image of two layers, as an OCI layout in an archive -----------------------------

busybox=$(command -v busybox)
mkdir -p one/bin one/etc one/home/me one/usr/bin two/etc
cp "$busybox" one/bin/busybox
for applet in sh cat echo id pwd ls mount sync touch wc hostname sleep reboot; do
	ln -s busybox "one/bin/$applet"
done
printf 'root:x:0:0:root:/root:/bin/sh\nme:x:1000:1000::/home/me:/bin/sh\n' >one/etc/passwd
printf 'root:x:0:\nme:x:1000:\n' >one/etc/group
echo below >one/etc/replaced
echo below >one/etc/removed
echo image >one/etc/hostname
cat >one/usr/bin/entry <<'SH'
#!/bin/sh
echo "$1 $(id -un) $(pwd) $A $B $HOME $(cat /etc/replaced)"
[ -e /etc/removed ] && echo removed is there
hostname
touch /etc/x 2>/dev/null && echo root is writable
echo tmp >/tmp/x && cat /tmp/x
SH
cat >one/usr/bin/init <<'SH'
#!/bin/sh
trap 'echo init was asked to end >/dev/console; sync; reboot -f' TERM
echo $$ >/run/init
while :; do sleep 1; done
SH
chmod 0755 one/usr/bin/entry one/usr/bin/init
chown 1000:1000 one/home/me
echo above >two/etc/replaced
touch two/etc/.wh.removed

mkdir -p layout/blobs/sha256
blob() { # FILE: puts it in, its digest in $digest
	digest=$(sha256sum "$1" | cut -d' ' -f1)
	mv "$1" "layout/blobs/sha256/$digest"
}
tar -C one -czf layer . && blob layer && first=$digest
tar -C two -cf layer . && blob layer && second=$digest
cat >config <<'JSON'
{"os": "linux", "config": {"User": "me", "WorkingDir": "/home/me", "Env": ["A=1", "B=2"],
 "Entrypoint": ["/usr/bin/entry"], "Cmd": ["hello"]}}
JSON
blob config && config=$digest
printf '{"config": {"digest": "sha256:%s"}, "layers": [{"digest": "sha256:%s"}, {"digest": "sha256:%s"}]}' \
	"$config" "$first" "$second" >manifest
blob manifest
printf '{"manifests": [{"digest": "sha256:%s"}]}' "$digest" >layout/index.json
echo '{"imageLayoutVersion": "1.0.0"}' >layout/oci-layout

tar -C layout -cf - . | "$MAYFLY" image import box - --size 64M >out.txt 2>stderr.txt
equal "import: status" $? 0
contains "import: what it says" "$(cat out.txt)" "box: image "
disk=$("$MAYFLY" image inspect box | python3 -c 'import json, sys; print(json.load(sys.stdin)["dir"])')/root.img
sum=$(sha256sum "$disk" | cut -d' ' -f1)
check "import: a file system without faults" e2fsck -fn "$disk"
equal "import: one in the list" "$("$MAYFLY" image ls --json | python3 -c '
import json, sys
[image] = json.load(sys.stdin)
print(image["names"], image["config"]["workdir"], image["size_bytes"] >> 20)')" "['box'] /home/me 64"
check "verify" "$MAYFLY" image verify box

# --- The same from a registry ------------------------------------------------------------------------

mkfifo port
python3 "$(dirname "$0")/registry.py" layout >port &
registry=$!
read -r port <port
mkdir -p user/.config/containers
printf '[[registry]]\nlocation = "127.0.0.1:%s"\ninsecure = true\n' "$port" >user/.config/containers/registries.conf
HOME=$PWD/user "$MAYFLY" image pull "127.0.0.1:$port/some/pulled:1" --size 64M >out.txt 2>stderr.txt
equal "pull: status" "$? $(cat stderr.txt)" "0 "
equal "pull: its name, and what it says of itself" "$("$MAYFLY" image inspect pulled | python3 -c '
import json, sys
image = json.load(sys.stdin)
print(image["config"]["user"], image["config"]["workdir"], image["source"].partition("/")[2])')" \
	"me /home/me some/pulled:1"
pulled=$("$MAYFLY" image inspect pulled | python3 -c 'import json, sys; print(json.load(sys.stdin)["dir"])')/root.img
equal "pull: both layers, one over the other" "$(debugfs -R 'cat /etc/replaced' "$pulled" 2>/dev/null)" above
HOME=$PWD/user "$MAYFLY" image pull "127.0.0.1:$port/some/pulled:2" --name other 2>stderr.txt
equal "pull: what is not there: status" $? 125
contains "pull: what is not there: why" "$(cat stderr.txt)" "mayfly image: skopeo: "
"$MAYFLY" image pull "two words" 2>stderr.txt
equal "pull: nonsense" $? 2
kill "$registry"
"$MAYFLY" image rm pulled

# --- As a root, read-only: with the command, user, folder and environment that the image names -------

run_guest --image box,mode=ro -e B=3
equal "read-only: status" "$status" 0
equal "read-only: the image's own command" "$out" "hello me /home/me 1 3 /home/me above
image
tmp"

# --- As a root that is written to, twice ------------------------------------------------------------

"$MAYFLY" up --image box,quota=32M --timeout "$GUEST_TIMEOUT" m >out.txt 2>&1
equal "up: status" $? 0
equal "exec: as the image says" "$("$MAYFLY" exec m -- sh -c 'id -un; pwd; echo $A')" "me
/home/me
1"
equal "exec: unless told otherwise" "$("$MAYFLY" exec -u root -w / -e A=9 m -- sh -c '
	id -un; pwd; echo $A; echo mine >/etc/mine; sync')" "root
/
9"
out=$("$MAYFLY" exec -u root m -- mount)
contains "the root is the disk" "$out" "/dev/vda on / type ext4 (rw"
contains "run is in memory" "$out" "tmpfs on /run type tmpfs"
equal "nothing of the initramfs is left in sight" "$("$MAYFLY" exec m -- sh -c 'ls -d /init /mnt 2>/dev/null | wc -l')" 0
echo copied >copied
check "cp in" "$MAYFLY" cp copied m:/etc/copied
"$MAYFLY" image rm box 2>stderr.txt
equal "rm: what is needed stays" $? 125
contains "rm: who needs it" "$(cat stderr.txt)" "machine 'm'"
equal "inspect" "$("$MAYFLY" inspect m | python3 -c '
import json, sys
m = json.load(sys.stdin)
print(m["state"], m["config"]["machine"]["root"], m["config"]["disk"]["quota"], m["image"]["config"]["user"],
      m["config"]["disk"]["file"].split("/")[-2] == m["image"]["id"])')" "running disk 32768K me True"
check "down" "$MAYFLY" down m
# And now with an init of its own.
sed -i 's,^init = .*,init = /usr/bin/init,' "$MAYFLY_HOME/vms/m/vm.ini"
check "up again" "$MAYFLY" up --timeout "$GUEST_TIMEOUT" m
equal "what was written is there" "$("$MAYFLY" exec m -- cat /etc/mine /etc/copied)" "mine
copied"
out=$("$MAYFLY" exec m -- sh -c '
	until [ -s /run/init ]; do sleep 1; done
	cat /run/init /proc/1/comm; ls -d /sys/fs/cgroup/cgroup.procs /dev/pts/ptmx')
equal "init: it is PID 1, beside the agent" "$out" "1
init
/dev/pts/ptmx
/sys/fs/cgroup/cgroup.procs"
check "init: down" "$MAYFLY" down m
contains "init: it was asked" "$(cat "$MAYFLY_HOME/vms/m/console.log")" "init was asked to end"
"$MAYFLY" rm m
equal "the image is as it was" "$(sha256sum "$disk" | cut -d' ' -f1)" "$sum"
check "verify again" "$MAYFLY" image verify box
printf x | dd of="$disk" bs=1 seek=70000 conv=notrunc 2>/dev/null
"$MAYFLY" image verify box 2>stderr.txt
equal "verify: one that was changed" $? 125
check "rm" "$MAYFLY" image rm box
equal "rm: all of it" "$(ls "$MAYFLY_HOME/images")" names

# --- What nobody can name any more ------------------------------------------------------------------

for content in old new; do
	mkdir -p "tiny-$content" && echo $content >"tiny-$content/file"
	check "import: a folder" "$MAYFLY" image import tiny "tiny-$content" --size 64M
done
equal "a name goes to another image" "$(ls "$MAYFLY_HOME/images" | wc -l)" 3
contains "gc" "$("$MAYFLY" gc)" "1 images"
equal "gc: the one with the name is left" "$(ls "$MAYFLY_HOME/images" | wc -l)" 2
check "rm: the last one" "$MAYFLY" image rm tiny

# --- Archives that mean harm ------------------------------------------------------------------------

mkdir -p evil/sub outside/kept
echo safe >outside/file
ln -s "$PWD/outside" evil/sub/absolute
ln -s ../../../../../../../../../../../../../../..$PWD/outside evil/sub/relative
tar -C evil -cf evil.tar .
rm evil/sub/absolute evil/sub/relative
mkdir evil/sub/absolute evil/sub/relative
echo harm >evil/sub/absolute/file
echo harm >evil/sub/relative/file
tar -C evil -rf evil.tar ./sub/absolute/file ./sub/relative/file
echo harm >harm
tar -P -rf evil.tar --transform "s,^harm,../../../../harm1," harm
tar -P -rf evil.tar --transform "s,^harm,$PWD/harm2," harm
"$MAYFLY" image import evil evil.tar --size 64M >out.txt 2>&1
equal "evil: what is outside is as it was" "$(cat outside/file; ls outside)" "safe
file
kept"
equal "evil: nothing new outside" "$(find "$MAYFLY_HOME" "$PWD" -name 'harm[12]')" ""
"$MAYFLY" image rm evil >/dev/null 2>&1
"$MAYFLY" image import bad "$busybox" >out.txt 2>&1
equal "not an archive: status" $? 125
contains "not an archive: message" "$(cat out.txt)" "bsdtar"
mkdir -p cut/blobs && cp -r layout/. cut && truncate -s -1 "cut/blobs/sha256/$second"
"$MAYFLY" image import cut cut >out.txt 2>&1
contains "a layer that is cut: message" "$(cat out.txt)" "its content is another"
"$MAYFLY" image import small layout --size 2M >out.txt 2>&1
contains "too small: message" "$(cat out.txt)" "--size"
run_guest --image none -- true
contains "no such image: message" "$errors" "there is no image 'none'"
equal "nothing half made is left" "$(ls "$MAYFLY_HOME/images")" names

# --- Debian, if it is cached or can be had ----------------------------------------------------------

arguments="debian-12 --packages python3-minimal"
key=$(cat "$(dirname "$0")"/../../cli/{image,rootfs_make,rootfs_store}.c | sha256sum | cut -c1-16)
cache=${MAYFLY_CACHE:-/var/cache/mayfly}/images/$key
reason=
if [ ! -d "$cache" ]; then
	if ! command -v mmdebstrap >/dev/null; then
		reason="mmdebstrap is not installed"
	elif [ ! -w "$(dirname "$(dirname "$cache")")" ]; then
		reason="no Debian image in $cache"
	elif ! timeout 20 bash -c ': </dev/tcp/deb.debian.org/80' 2>/dev/null; then
		reason="no Debian image in $cache, and deb.debian.org is out of reach"
	else
		# shellcheck disable=SC2086
		"$MAYFLY" image build $arguments >build.txt 2>&1
		equal "debian: build" $? 0
		rm -rf "${cache%/*}" # what older versions have made
		mkdir -p "${cache%/*}" && cp -a "$MAYFLY_HOME/images" "$cache.$$" && mv -T "$cache.$$" "$cache"
	fi
fi
if [ -n "$reason" ]; then
	skip "debian: $reason"
else
	rm -rf "$MAYFLY_HOME/images" && cp -a "$cache" "$MAYFLY_HOME/images"
	run_guest --image debian-12 -- python3 -c 'import os
print(open("/etc/debian_version").read()[:3], os.path.isdir("/var/lib/dpkg"), 6 * 7, os.uname().nodename)'
	equal "debian: python3 in it" "$out" "12. True 42 mayfly"
fi
check "nothing left" nothing_left
finish
