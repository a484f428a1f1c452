# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The allow-list: what is on it is reached, by name, through the proxy; nothing else is, by no trick;
# changes are in force at once; without the proxy there is no way out; a fork and a restore have no
# more than their parent.
. "$(dirname "$0")/lib.sh"

# Names of the test's own, which this host's /etc/hosts is for: in a mount namespace.
if [ -z "${EGRESS_HOSTS:-}" ]; then
	if ! unshare -m true 2>stderr.txt; then
		skip "egress: no mount namespaces here: $(cat stderr.txt)"
		finish
	fi
	EGRESS_HOSTS=1 exec unshare -m bash "$0"
fi
printf '127.0.0.1 localhost good.test\n127.7.7.7 api.test other-api.test\n10.0.0.1 inside.test\n169.254.169.254 meta.test\n' >hosts
if ! mount --bind hosts /etc/hosts 2>stderr.txt; then
	skip "egress: $(cat stderr.txt)"
	finish
fi
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=api.test \
	-addext subjectAltName=DNS:api.test -keyout key.pem -out cert.pem 2>stderr.txt
export SSL_CERT_FILE=$PWD/cert.pem
python3 "$(dirname "$0")/egress_server.py" cert.pem key.pem asked.txt >port.txt 2>server.txt &
server=$!
trap 'kill $server; "$MAYFLY" rm --force dev two >/dev/null 2>&1' EXIT
serves() { [ -s port.txt ]; }
check "a server listens" until_true serves
port=$(cat port.txt)
dir=$MAYFLY_HOME/vms/dev

"$MAYFLY" create --allow '*' dev 2>stderr.txt
equal "a rule that names nothing is refused" $? 2
"$MAYFLY" up --timeout "$GUEST_TIMEOUT" --allow "good.test:$port" --allow "127.0.0.1:$port" \
	--allow '*.test' dev 2>stderr.txt
equal "up: $(cat stderr.txt)" $? 0
in_guest() { "$MAYFLY" exec ${name:-dev} -- sh -c "$1" 2>/dev/null; }
get() { in_guest "wget -q -O - http://$1"; }
equal "what is on the list is reached" "$(get "good.test:$port/one")" "you asked for /one"
equal "there is no network card" "$(in_guest 'echo /sys/class/net/*')" /sys/class/net/lo

# --- What is not -----------------------------------------------------------------------------

# The first line that a proxy answers to what is sent to it as it stands.
raw() { in_guest "printf '$1' | nc 127.0.0.1 3128 | head -n 1" | tr -d '\r'; }
refused() { equal "$1: refused" "$(get "$2")" ""; }
# All of them in one go: a line each, "got NAME: what came".
asks=
ask() { asks+="echo \"got $1: \$(wget -q -O - http://$2)\";"; }
says() { asks+="echo \"got $1: \$(printf '$2' | nc 127.0.0.1 3128 | head -n 1)\";"; }
ask "another host" other.example/
ask "another port" good.test:81/
ask "an address" 127.0.0.2:$port/
ask "a name that leads inside" inside.test/
ask "a metadata service by name" meta.test/
ask "a redirect to it" "good.test:$port/to/http://169.254.169.254/latest"
ask "a redirect to another host" "good.test:$port/to/http://other.example/"
says "CONNECT to an address" 'CONNECT 169.254.169.254:443 HTTP/1.0\r\n\r\n'
says "CONNECT to a number" 'CONNECT 2130706433:443 HTTP/1.0\r\n\r\n'
says "a Host that differs" "GET http://good.test:$port/ HTTP/1.1\r\nHost: other.example\r\n\r\n"
says "two lengths" "GET http://good.test:$port/ HTTP/1.1\r\nHost: good.test:$port\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n"
in_guest "$asks" | tr -d '\r' >answers.txt
wanted() { equal "$1" "$(grep "^got $1: " answers.txt)" "got $1: $2"; }
for what in "another host" "another port" "an address" "a name that leads inside" \
	"a metadata service by name" "a redirect to it" "a redirect to another host"; do
	wanted "$what" ""
done
wanted "CONNECT to an address" "HTTP/1.1 403 Forbidden"
wanted "CONNECT to a number" "HTTP/1.1 400 Bad Request"
wanted "a Host that differs" "HTTP/1.1 400 Bad Request"
wanted "two lengths" "HTTP/1.1 400 Bad Request"
equal "around the proxy" "$(in_guest "(echo x | nc -w 5 1.1.1.1 80) || (wget -Y off -q -O - http://good.test:$port/) || echo no")" no
# The guest's root with raw sockets, ICMP, IPv6, QUIC's port, a name server of its choice, a card of its own.
equal "around the proxy, by other ways than TCP" "$(in_guest 'exec 2>/dev/null
ping -c 1 -W 2 1.1.1.1 && echo got ICMP
ping -6 -c 1 -W 2 2606:4700:4700::1111 && echo got ICMPv6
echo x | nc -u -w 2 1.1.1.1 443 | grep . && echo got UDP
nslookup example.com 1.1.1.1 | grep -q "Name:" && echo got DNS
ip link add d0 type dummy; ip link set d0 up; ip addr add 192.0.2.7/24 dev d0; ip route add default via 192.0.2.1
ping -c 1 -W 2 192.0.2.1 && echo got a card' | grep got)" ""
"$MAYFLY" net dev denials >denials.txt
contains "denials: another host" "$(cat denials.txt)" "other.example:80 is not on this machine's list"
contains "denials: a name that leads inside" "$(cat denials.txt)" "inside.test is 10.0.0.1, which is private"
contains "denials: metadata" "$(cat denials.txt)" "169.254.169.254, which is link-local"
"$MAYFLY" net dev denials --json | python3 -c 'import json, sys; sys.exit(not json.load(sys.stdin))'
equal "denials --json" $? 0
contains "log" "$("$MAYFLY" net dev log)" "admitted GET     good.test:$port"
contains "replay tells of them, too" "$("$MAYFLY" replay dev)" "network denied: {"
contains "the log is whole" "$("$MAYFLY" audit verify dev)" "log of requests is whole"
contains "explain" "$("$MAYFLY" explain dev)" "*.test (ports 80 and 443)"

# --- The processes ---------------------------------------------------------------------------

keeper=$(head -n 1 "$dir/egress/lock")
proxy=$(pgrep -P "$keeper")
status_of() { awk -v key="$1:" '$1 == key { print $2 }' "/proc/$proxy/status"; }
equal "the proxy's system calls are filtered" "$(status_of Seccomp)" 2
equal "it has no capabilities" "$(status_of CapEff)" 0000000000000000
[ "$(id -u)" != 0 ] || equal "it is nobody" "$(status_of Uid)" 65534
equal "it sees no file" "$(ls -A "/proc/$proxy/root/")" ""

# --- At once ---------------------------------------------------------------------------------

# Opens a tunnel in a job that lives as long as its connection.
tunnel() {
	"$MAYFLY" exec --detach --job "$1" dev -- sh -c \
		"(printf 'CONNECT good.test:$port HTTP/1.0\r\n\r\nhello\n'; sleep 1000) |
		{ nc 127.0.0.1 3128; echo ended; }" >/dev/null
	echoes() { "$MAYFLY" logs dev "$1" | grep -q hello; }
	check "$1: a connection is open" until_true echoes "$1"
}
has_ended() { "$MAYFLY" logs dev "$1" | grep -q ended; }
# nc sees the end at once; what feeds it does not.
cut_off() {
	check "$1 cuts it" until_true has_ended "$1"
	in_guest 'killall sleep'
}
tunnel deny
contains "deny cuts" "$("$MAYFLY" net dev deny "good.test:$port" 2>&1)" "1 connection cut"
cut_off deny
refused "what was taken from the list" "good.test:$port/"
"$MAYFLY" net dev allow "good.test:$port"
equal "allow" "$(get "good.test:$port/two")" "you asked for /two"
"$MAYFLY" snapshot dev open >/dev/null
tunnel off
"$MAYFLY" net dev off
equal "off" $? 0
cut_off off
refused "all, once it is off" "good.test:$port/"
"$MAYFLY" net dev off --keep "good.test:$port 127.0.0.1:$port"
equal "off but for one" "$(get "good.test:$port/kept")" "you asked for /kept"
equal "all else is off" "$(raw 'GET http://other.test/ HTTP/1.0\r\n\r\n')" "HTTP/1.1 403 Forbidden"
"$MAYFLY" net dev allowlist
equal "on again: that one is asked for" "$(raw 'GET http://other.test/ HTTP/1.0\r\n\r\n')" "HTTP/1.1 502 Bad Gateway"
equal "on again" "$(get "good.test:$port/three")" "you asked for /three"

# --- Credentials -----------------------------------------------------------------------------

token=sk-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
"$MAYFLY" net dev allow api.test 127.7.7.7:443
API_KEY="Bearer $token" "$MAYFLY" secret add --host api.test --from-env API_KEY dev api
equal "secret add" $? 0
echo "$token" >value
"$MAYFLY" secret add --host other-api.test --header X-Key --from-file value dev other
equal "secret add --from-file" $? 0
equal "secret ls" "$("$MAYFLY" secret ls dev | tail -n 1)" "$(printf '%-20s %-40s X-Key' other other-api.test)"
answer=$(in_guest 'wget -q -O - --header "Authorization: Bearer mine" http://api.test/v1')
contains "a request goes out over TLS" "$answer" "GET /v1 HTTP/1.1"
contains "the server has seen the credential" "$(cat asked.txt)" "Authorization: Bearer $token"
contains "the guest sees stars" "$answer" "Authorization: ***"
equal "it goes in no tunnel" "$(raw 'CONNECT api.test:443 HTTP/1.0\r\n\r\n')" "HTTP/1.1 403 Forbidden"
equal "nor to who cannot prove that it is the host" "$(raw 'GET http://other-api.test/ HTTP/1.0\r\n\r\n')" \
	"HTTP/1.1 502 Bad Gateway"
contains "the log has its name" "$("$MAYFLY" net dev log --json)" '"credential":"api"'
contains "and what was wrong" "$("$MAYFLY" net dev log)" "the certificate of other-api.test is another's"
# It is nowhere but in its file: not in the machine's folder, its memory, or a process's words.
"$MAYFLY" snapshot dev secret >/dev/null
keeper=$(head -n 1 "$dir/egress/lock")
for form in "$token" "$(printf %s "$token" | base64 -w 0 | head -c 40)" "$(printf %s "$token" | od -An -tx1 | tr -d ' \n')"; do
	equal "nowhere: ${form:0:3}..." "$(grep -rlaF "$form" "$MAYFLY_HOME" | grep -v '/secrets/dev.json$')" ""
	equal "nor in words: ${form:0:3}..." "$(cat /proc/"$keeper"/{cmdline,environ} /proc/"$(monitor_pid dev)"/{cmdline,environ} |
		grep -caF "$form")" 0
done
"$MAYFLY" secret rm dev api
"$MAYFLY" secret rm dev other
equal "secret rm" "$("$MAYFLY" secret ls --json dev)" "[]"

# --- Whatever ends ---------------------------------------------------------------------------

gone() { ! kill -0 "$1" 2>/dev/null; }
keeper=$(head -n 1 "$dir/egress/lock")
proxy=$(pgrep -P "$keeper")
kill -9 "$proxy"
check "without its proxy the keeper ends" until_true gone "$keeper"
refused "without a proxy" "good.test:$port/"
contains "explain says so" "$("$MAYFLY" explain dev)" "nothing at the moment"
"$MAYFLY" net dev allowlist
equal "and with a new one" "$(get "good.test:$port/four")" "you asked for /four"
keeper=$(head -n 1 "$dir/egress/lock")
proxy=$(pgrep -P "$keeper")
kill -9 "$keeper"
check "without its keeper the proxy ends" until_true gone "$proxy"
refused "without a keeper" "good.test:$port/"
"$MAYFLY" net dev allowlist

# --- Forks and restores ----------------------------------------------------------------------

"$MAYFLY" net dev deny '*.test'
"$MAYFLY" fork dev@open two 2>stderr.txt
equal "fork: $(cat stderr.txt)" $? 0
equal "a fork reaches what both have" "$(name=two get "good.test:$port/fork")" "you asked for /fork"
equal "and nothing that its parent has lost" "$("$MAYFLY" net two | grep -c '\*')" 0
"$MAYFLY" net dev none
"$MAYFLY" restore dev open 2>stderr.txt
equal "restore: $(cat stderr.txt)" $? 0
equal "a restore does not bring back what was closed" "$("$MAYFLY" net dev | head -n 1)" none
refused "nor does its guest reach it" "good.test:$port/"
"$MAYFLY" net dev allowlist
equal "until its owner says so" "$(get "good.test:$port/five")" "you asked for /five"

keeper=$(head -n 1 "$dir/egress/lock")
kill -9 "$(monitor_pid dev)"
check "without its machine the keeper ends" until_true gone "$keeper"
keeper=$(head -n 1 "$MAYFLY_HOME/vms/two/egress/lock")
"$MAYFLY" down two
check "nor is it left after down" until_true gone "$keeper"
"$MAYFLY" rm --force dev two
run_guest --allow "good.test:$port" --allow "127.0.0.1:$port" -- wget -q -O - "http://good.test:$port/run"
equal "a throwaway machine: $errors" "$out" "you asked for /run"
check "nothing left" nothing_left
no_keeper() { ! pgrep -x mayfly-egress -a | grep -F "$MAYFLY_HOME"; }
check "nor a keeper" until_true no_keeper
finish
