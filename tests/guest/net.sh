# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Networks: none by default, a tap, passt. What goes over them arrives whole, rates are bounded, what
# the host keeps to itself stays out of reach, and nothing is left of a start that fails. All of it
# in two network namespaces of the test's own.
. "$(dirname "$0")/lib.sh"

stream=$TEST_BUILD/tests/guest/stream
for tool in ip passt; do
	command -v $tool >/dev/null || {
		skip "networks: $tool is not installed"
		finish
	}
done
# Machines live in the namespace $ns, with a tap and a way out to $far.
ns=mf-net-$$ far=mf-far-$$
if ! ip netns add $ns 2>stderr.txt; then
	skip "networks: no network namespaces here: $(cat stderr.txt)"
	finish
fi
ip netns add $far
servers=()
cleanup() {
	[ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2>/dev/null
	"$MAYFLY" rm --force dev >/dev/null 2>&1
	ip netns del $ns
	ip netns del $far
}
trap cleanup EXIT
in_ns() { ip netns exec $ns "$@"; }
in_ns ip link set lo up
in_ns ip tuntap add mf-tap mode tap
in_ns ip addr add 10.77.0.1/24 dev mf-tap
in_ns ip link set mf-tap up
ip link add mf-near netns $ns type veth peer name mf-far netns $far
in_ns ip addr add 198.51.100.1/24 dev mf-near
in_ns ip link set mf-near up
ip netns exec $far ip addr add 198.51.100.2/24 dev mf-far
ip netns exec $far ip link set mf-far up
in_ns ip route add default via 198.51.100.2
# serve NAMESPACE ADDRESS
serve() {
	ip netns exec "$1" "$stream" serve "tcp:$2:5001" >"ready-$2" 2>&1 &
	servers+=($!)
	listens() { grep -q ready "ready-$1"; }
	check "a server listens on $2" until_true listens "$2"
}
serve $ns 10.77.0.1
serve $ns 127.0.0.1
serve $far 198.51.100.2

# Interpreted kernels move 100 KB a second.
if [ -n "${MAYFLY_LAB:-}" ]; then bytes=20000000 rate=6M; else bytes=300000 rate=100K; fi
in_guest() { "$MAYFLY" exec dev -- /tmp/stream "$@"; }
# transfer NAME PEER: both ways, each byte checked.
transfer() {
	check "$1: $bytes bytes to the guest" in_guest get "tcp:$2:5001" $bytes
	check "$1: and from it" in_guest put "tcp:$2:5001" $bytes
}
# With a rate of about a third of it a second each way. No machine is too slow to pass.
transfer_at_rate() {
	local started took_ms
	started=$(date +%s%N)
	transfer "$@"
	took_ms=$((($(date +%s%N) - started) / 1000000))
	check "$1: at $rate a second it took $took_ms ms" [ $took_ms -gt 5000 ]
}

# iperf NAME NAMESPACE PEER: the guest's image has no iperf3, so ours goes there with its libraries.
iperf() {
	if [ -z "${MAYFLY_LAB:-}" ] || ! command -v iperf3 >/dev/null; then
		skip "$1: iperf3 (in the lab, where it is installed; it is a minute's copying for an interpreted kernel)"
		return
	fi
	mkdir -p iperf/lib
	cp "$(command -v iperf3)" iperf/
	for lib in $(ldd iperf/iperf3 | grep -o '/[^ ]*'); do cp -L "$lib" iperf/lib/; done
	"$MAYFLY" cp iperf dev:/tmp/iperf
	ip netns exec "$2" iperf3 -s --forceflush >"iperf-$2" 2>&1 &
	servers+=($!)
	iperf_listens() { grep -q listening "iperf-$1"; }
	check "$1: iperf3 listens" until_true iperf_listens "$2"
	for way in "" -R; do
		"$MAYFLY" exec dev -- sh -c "cd /tmp/iperf && lib/ld-linux-x86-64.so.2 --library-path lib \
			./iperf3 -c $3 -t 3 -J $way" >iperf.json
		equal "$1: iperf3 $way" $? 0
		python3 -c 'import json
print("%.0f Mbit/s" % (json.load(open("iperf.json"))["end"]["sum_received"]["bits_per_second"] / 1e6))'
	done
}

in_ns "$MAYFLY" up --timeout "$GUEST_TIMEOUT" --net tap:mf-tap,address=10.77.0.2/24,gateway=10.77.0.1 dev
equal "tap: up" $? 0
"$MAYFLY" cp "$stream" dev:/tmp/stream
about=$("$MAYFLY" exec dev -- sh -c 'cat /sys/class/net/eth0/address; ip -4 addr show eth0; ip route')
contains "tap: address" "$about" "inet 10.77.0.2/24"
contains "tap: route" "$about" "default via 10.77.0.1"
case $about in ?[26ae]:*) ok "tap: the address of the card is our own" ;; *) fail "tap: MAC in '$about'" ;; esac
offloads=$(in_ns cat /sys/class/net/mf-tap/tun_flags)
check "tap: packets carry the header of virtio" [ $((offloads & 0x4000)) -ne 0 ]
packets() { in_ns cat "/sys/class/net/mf-tap/statistics/$1"; }
transfer "tap" 10.77.0.1
before=$(packets rx_packets) before_bytes=$(packets rx_bytes)
check "tap: again from it" in_guest put tcp:10.77.0.1:5001 $bytes
mean=$((($(packets rx_bytes) - before_bytes) / ($(packets rx_packets) - before)))
# More than a frame of an Ethernet holds.
check "tap: segments are left whole ($mean bytes a packet)" [ $mean -gt 1514 ]
iperf "tap" $ns 10.77.0.1
in_ns "$MAYFLY" run --cold --net tap:mf-tap -- true 2>stderr.txt
equal "a tap in use: status" $? 125
contains "a tap in use: message" "$(cat stderr.txt)" "in use"
"$MAYFLY" rm --force dev

# Where a boot takes seconds the rate has no machine of its own.
if [ -n "${MAYFLY_LAB:-}" ]; then
	in_ns "$MAYFLY" up --net "tap:mf-tap,address=10.77.0.2/24,bytes_per_s=$rate" dev
	equal "tap with a rate: up" $? 0
	"$MAYFLY" cp "$stream" dev:/tmp/stream
	transfer_at_rate "tap" 10.77.0.1
	"$MAYFLY" rm --force dev
	in_ns "$MAYFLY" up --net passt dev
else
	in_ns "$MAYFLY" up --timeout "$GUEST_TIMEOUT" --net "passt,bytes_per_s=$rate" dev
fi
equal "passt: up" $? 0
"$MAYFLY" cp "$stream" dev:/tmp/stream
if [ -n "${MAYFLY_LAB:-}" ]; then transfer "passt" 198.51.100.2; else transfer_at_rate "passt" 198.51.100.2; fi
# What listens on the host's loopback is not for the guest, by whichever address it asks for it.
for address in 10.0.2.2 127.0.0.1; do
	timeout 10 "$MAYFLY" exec dev -- /tmp/stream get tcp:$address:5001 4 >/dev/null 2>&1
	check "passt: a service of the host's loopback is out of reach by $address" [ $? -ne 0 ]
done
iperf "passt" $far 198.51.100.2
"$MAYFLY" rm --force dev

# nat: behind rules of its own namespace, which hold at once and for what is open.
if nft --version >/dev/null 2>&1 && in_ns nft list ruleset >/dev/null 2>&1; then
	ip netns exec $far ip addr add 11.22.33.44/32 dev mf-far
	serve $far 11.22.33.44
	in_ns "$MAYFLY" up --timeout "$GUEST_TIMEOUT" --net nat dev
	equal "nat: up" $? 0
	"$MAYFLY" cp "$stream" dev:/tmp/stream
	reaches() { timeout ${2:-60} "$MAYFLY" exec dev -- /tmp/stream get "tcp:$1:5001" 1000 >/dev/null 2>&1; }
	refuses() { ! reaches "$1" 10; }
	check "nat: a public address" reaches 11.22.33.44
	# A listener on each that is here.
	got=$("$MAYFLY" exec dev -- sh -c 'for a in 198.51.100.2 198.51.100.1 10.77.0.1 10.0.2.2 127.0.0.1; do
		timeout 10 /tmp/stream get tcp:$a:5001 4 >/dev/null 2>&1 && echo $a & done; wait')
	equal "nat: private addresses, the host and its network are refused" "$got" ""
	in_ns "$MAYFLY" net dev allow 198.51.100.2:5001
	check "nat: an address that is named" reaches 198.51.100.2
	"$MAYFLY" exec dev -- /tmp/stream get tcp:11.22.33.44:5001 1000000000 >/dev/null 2>&1 &
	transfer=$!
	flows() { [ "$(ip netns exec $far ss -Htn state established sport = :5001 | wc -l)" -gt 0 ]; }
	eventually "nat: a long transfer" flows
	in_ns "$MAYFLY" net dev off
	equal "nat: off" $? 0
	gone() { ! kill -0 $transfer 2>/dev/null; }
	eventually "nat: what is open is cut" gone
	check "nat: nothing is reached" refuses 11.22.33.44
	in_ns "$MAYFLY" net dev nat
	check "nat: and again" reaches 11.22.33.44
	contains "nat: explained" "$("$MAYFLY" explain dev)" "public Internet"
	equal "nat: the host's tables are as they were" "$(in_ns nft list ruleset)" ""
	"$MAYFLY" rm --force dev
else
	skip "nat: no nftables in this kernel, or no nft"
fi

# Failures: clear words, and neither a process nor a tap stays.
bad() {
	in_ns "$MAYFLY" run --cold "${@:4}" -- true >/dev/null 2>stderr.txt
	equal "$1: status" $? "$2"
	contains "$1: message" "$(<stderr.txt)" "$3"
}
head -c 100000 /dev/urandom >noise
bad "a failed start with passt" 125 noise --net passt --kernel noise
bad "a failed start with a new tap" 125 noise --net tap:mf-new --kernel noise
bad "an unknown mode" 2 "none of none, tap, passt, allowlist and nat" --net bridge
bad "a tap without a name" 2 "write it tap:NAME" --net tap
bad "a bad address" 2 "10.0.0.2/24" --net tap:x,address=10.0.0.2
in_ns ip link show mf-new >/dev/null 2>&1
check "no tap is left" [ $? -ne 0 ]
in_ns ip route del default
bad "passt without a way out" 125 "passt does not start: External interface" --net passt
PATH=$(dirname "$(command -v ip)"):/bin-without-passt bad "passt that is not there" 125 "apt-get install passt" --net passt

kill "${servers[@]}"
wait "${servers[@]}" 2>/dev/null
servers=()
# passt ends when its socket is closed, a moment later.
alone() { [ -z "$(ip netns pids $ns)" ]; }
check "no process is left" until_true alone
check "nothing left" nothing_left
finish
