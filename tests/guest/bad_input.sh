# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Bad input to mayfly run: each a clear message, the right status, and nothing left behind.
. "$(dirname "$0")/lib.sh"

# bad NAME STATUS WORDS ARGS…
bad() {
	local name=$1 wanted=$2 words=$3
	shift 3
	run_guest "$@"
	equal "$name: status" "$status" "$wanted"
	contains "$name: message" "$errors" "$words"
	equal "$name: no output" "$out" ""
	check "$name: nothing left" nothing_left
}

kernel=$(readlink -f "$(dirname "$MAYFLY")/vmlinux")
head -c 5000 "$kernel" >truncated
bad "truncated kernel" 125 "truncated" --kernel truncated -- true
head -c 100000 /dev/urandom >noise
bad "not a kernel" 125 "noise" --kernel noise -- true
: >empty
bad "empty kernel" 125 "empty" --kernel empty -- true
# A program header that lies: p_filesz of the first one is made huge.
cp "$kernel" lying
printf '\377\377\377\377\377\377\377\177' | dd of=lying bs=1 seek=$((64 + 32)) conv=notrunc status=none
bad "lying kernel" 125 "lying" --kernel lying -- true
bad "kernel is a folder" 125 "regular file" --kernel . -- true
bad "no such kernel" 125 "No such file" --kernel /no/such/kernel -- true
mkfifo fifo
bad "kernel is a fifo" 125 "regular file" --kernel fifo -- true
truncate -s 256M huge.cpio
bad "initramfs larger than memory" 125 "memory" --memory 128M --initramfs huge.cpio -- true
bad "1M of memory" 2 "1M is too little" --memory 1M -- true
bad "16M of memory" 125 "memory" --memory 16M -- true
bad "memory without a unit" 2 "512M" --memory 128 -- true
bad "an absurd amount of memory" 2 "at most 1024G" --memory 900000T -- true
bad "10,000 vCPUs" 2 "between 1 and 32" --cpus 10000 -- true
bad "no vCPUs" 2 "between 1 and 32" --cpus 0 -- true
bad "a bad timeout" 2 "30s" --timeout soon -- true
bad "a bad variable" 2 "NAME=VALUE" -e =x -- true
bad "no command" 2 "which command"
bad "unknown option" 2 "--help" --frobnicate -- true
bad "too long a kernel command line" 2 "append" --append "$(head -c 3000 /dev/zero | tr '\0' x)" -- true
bad "a control character in it" 2 "control" --append $'a\nb' -- true

"$MAYFLY" frobnicate 2>stderr.txt
equal "unknown verb: status" $? 2
contains "unknown verb: message" "$(cat stderr.txt)" "frobnicate"
for args in "" "run" "vmm" "doctor x" "exec -d --job ../x dev -- true" "shell -s a/b dev"; do
	# shellcheck disable=SC2086
	"$MAYFLY" $args >/dev/null 2>stderr.txt </dev/null
	equal "mayfly $args: usage" $? 2
done
for verb in "" run vmm doctor; do
	# shellcheck disable=SC2086
	"$MAYFLY" $verb --help >help.txt
	equal "mayfly $verb --help" $? 0
	contains "mayfly $verb --help: text" "$(cat help.txt)" "Usage: mayfly"
done

# Environment in which nothing can work. Each in a mount namespace of its own.
if unshare -m true 2>/dev/null; then
	unshare -m sh -c 'mount -t tmpfs -o size=64k none "$1" && head -c 100000 /dev/zero >"$1/fill" 2>/dev/null
		MAYFLY_HOME="$1" "$2" run -- true' sh "$PWD" "$MAYFLY" >out.txt 2>stderr.txt
	equal "full disk: status" $? 125
	contains "full disk: message" "$(cat stderr.txt)" "No space left"
	if [ -e /dev/kvm ]; then
		mkdir -p dev
		unshare -m sh -c 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3
			mknod -m 666 /dev/zero c 1 5; "$1" run -- true' sh "$MAYFLY" >out.txt 2>stderr.txt
		equal "no /dev/kvm: status" $? 125
		contains "no /dev/kvm: message" "$(cat stderr.txt)" "no KVM on this machine"
		unshare -m sh -c 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3; "$1" doctor' sh "$MAYFLY" >out.txt
		equal "no /dev/kvm: doctor's status" $? 1
		contains "no /dev/kvm: doctor" "$(cat out.txt)" "no KVM on this machine"
	fi
else
	skip "full disk, no /dev/kvm: no mount namespaces for this user"
fi
check "nothing left at the end" nothing_left
finish
