# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Disks under load: what fio writes it reads back, through several queues where there are several
# CPUs; and a monitor that is killed in the middle of it leaves a file system that was synced as it
# was synced.
. "$(dirname "$0")/lib.sh"

command -v fio >/dev/null || {
	skip "disks under load: fio is not installed"
	finish
}
# The guest's image has no fio: it comes on a disk with its libraries, of which only what is used is
# read.
mkdir -p tools/lib
cp "$(command -v fio)" tools/
for lib in $(ldd tools/fio | grep -o '/[^ ]*'); do cp -L "$lib" tools/lib/; done
mkfs.erofs tools.erofs tools >/dev/null || fail "mkfs.erofs"
mkdir tree
seq 20000 >tree/numbers
truncate -s 48M base.img
mke2fs -q -F -t ext4 -b 4096 -d tree base.img || fail "mke2fs -d"
chmod 0444 base.img
truncate -s 32M raw.img
sums=$(sha256sum base.img tools.erofs)
if [ -n "${MAYFLY_LAB:-}" ]; then cpus=2 size=16M; else cpus=1 size=256K; fi

"$MAYFLY" up --timeout "$GUEST_TIMEOUT" --memory 256M --cpus $cpus --disk base.img --disk tools.erofs,mode=ro \
	--disk size=32M --disk raw.img,mode=raw dev
equal "up" $? 0
"$MAYFLY" exec dev -- sh -ec 'mkdir -p /mnt/tools /mnt/ov
	mount -t erofs -o ro /dev/vdb /mnt/tools; mount -t ext4 /dev/vda /mnt/ov'
equal "mounted" $? 0
if [ $cpus -gt 1 ]; then
	equal "a queue for each CPU" "$("$MAYFLY" exec dev -- sh -c 'ls /sys/block/vdc/mq | wc -l')" $cpus
else
	skip "several queues (in the lab: two CPUs are not reliable where ring 0 is emulated)"
fi
# fio NAME DEVICE: random writes of 512 bytes to 32 KiB, many at a time, each read back and compared;
# from each CPU there is.
fio() {
	"$MAYFLY" exec dev -- sh -c 'cd /mnt/tools && lib/ld-linux-x86-64.so.2 --library-path lib ./fio \
		--name=v --filename='"$2"' --thread --ioengine=libaio --direct=1 --iodepth=16 \
		--rw=randwrite --bsrange=512-32k --ba=512 --size='$size' --offset_increment='$size' \
		--numjobs='$cpus' --cpus_allowed=0-'$((cpus - 1))' --cpus_allowed_policy=split \
		--verify=crc32c --verify_fatal=1 --do_verify=1 --random_generator=lfsr' >fio.log 2>&1
	local rc=$?
	[ $rc -eq 0 ] || tail -n 20 fio.log
	equal "$1: fio --verify" $rc 0
}
fio "overlay" /dev/vdc
if [ -n "${MAYFLY_LAB:-}" ]; then
	fio "raw" /dev/vdd
else
	skip "raw: fio (in the lab: to start it costs an interpreted kernel half a minute)"
fi

# --- The monitor is killed while the guest writes ------------------------------------------------

"$MAYFLY" exec --detach --job writer dev -- sh -c 'i=0; while :; do
	i=$((i + 1)); seq $i $((i + 4000)) >/mnt/ov/f$i; sync; echo synced $i; done' >/dev/null
synced() { last=$("$MAYFLY" logs dev writer | awk '$1 == "synced" { n = $2 } END { print n + 0 }'); }
enough() { synced && [ "$last" -ge 4 ]; }
check "the guest writes" until_true enough
pid=$(monitor_pid dev)
kill -9 "$pid"
gone() { ! kill -0 "$pid" 2>/dev/null; }
check "the monitor is killed ($last files were synced)" until_true gone
# Whether f1 to f$last are what they were, in merged.img.
all_there() {
	local i
	for ((i = 1; i <= last; i++)); do
		[ "$(debugfs -R "cat f$i" merged.img 2>/dev/null | sha256sum)" = \
			"$(seq $i $((i + 4000)) | sha256sum)" ] || return 1
	done
}
overlay=$MAYFLY_HOME/vms/dev/disk.overlay
check "the overlay is sound" "$(dirname "$0")/merge_overlay.py" "$overlay" base.img merged.img
# As mount does: the journal. Anything else that is amiss would be status 4.
e2fsck -fp merged.img >e2fsck.log 2>&1
check "fsck with the journal" [ $? -le 1 ]
check "and again" e2fsck -fn merged.img
check "what was synced is there" all_there

"$MAYFLY" up --timeout "$GUEST_TIMEOUT" dev
equal "it starts again" $? 0
equal "the guest sees what it had synced" "$("$MAYFLY" exec dev -- sh -ec "mkdir -p /mnt/ov
	mount -t ext4 /dev/vda /mnt/ov; seq $last $((last + 4000)) | cmp - /mnt/ov/f$last
	echo more >/mnt/ov/more; umount /mnt/ov; echo same")" same
"$MAYFLY" down dev
check "the overlay is sound after that" "$(dirname "$0")/merge_overlay.py" "$overlay" base.img merged.img
check "fsck" e2fsck -fn merged.img
check "what was synced is there still" all_there
equal "the bases are as they were" "$(sha256sum base.img tools.erofs)" "$sums"
"$MAYFLY" rm --force dev
check "nothing left" nothing_left
finish
