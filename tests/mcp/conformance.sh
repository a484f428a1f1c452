#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# MCP's official conformance suite against `mayfly mcp --http`. conformance.sh BUILD
#
# What is not applicable to us is in not-applicable-*.yml, with its reason: everything else has to pass,
# and what is in there has to fail. The machine is down: the suite asks about the protocol alone, and
# what tools do in a machine is tested elsewhere.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mayfly=$(realpath "$1")/mayfly
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mayfly/mcp-conformance
work=$(mktemp -d)
server=
bad=0
trap '[ -z "$server" ] || kill $server; rm -rf "$work"' EXIT

# The newer one is still to come, and wants a younger node than Debian has.
"$here/npm.sh" "$cache/0.1.16" @modelcontextprotocol/conformance@0.1.16
"$here/npm.sh" "$cache/0.2.0" node@22 @modelcontextprotocol/conformance@0.2.0-alpha.12
node=$cache/0.2.0/node_modules/.bin/node
echo "node $("$node" --version), conformance 0.1.16 and 0.2.0-alpha.12"

export MAYFLY_HOME=$work
mkdir -p "$work/vms/box/run"
printf '[machine]\n[mcp]\naccess = exec\n' >"$work/vms/box/vm.ini"
coproc SERVER { exec "$mayfly" mcp --http box; }
server=$SERVER_PID
read -r url <&"${SERVER[0]}"
read -r _ token <&"${SERVER[0]}"
MCP_TOKEN=$(cat "$token")
export MCP_TOKEN NODE_OPTIONS="--import $here/bearer.mjs"

# run REVISION SUITE ARGS…
run() {
	local revision=$1 suite=$2 out=$work/$1-$2.txt
	shift 2
	if (cd "$work" && timeout 300 "$node" "$cache/$suite/node_modules/.bin/conformance" server --url "$url" \
		--expected-failures "$here/not-applicable-$revision-$suite.yml" "$@") >"$out" 2>&1; then
		echo "ok   $revision by $suite: $(grep -c '^✓' "$out") scenarios pass," \
			"$(grep -c '^✗' "$out") are not applicable"
	else
		echo "FAIL $revision by $suite"
		sed -n '/=== SUMMARY/,$p' "$out"
		bad=1
	fi
}

run 2025-11-25 0.1.16 --suite all
run 2025-11-25 0.2.0 --requirements 2025-11-25
run 2026-07-28 0.2.0 --requirements 2026-07-28
exit $bad
