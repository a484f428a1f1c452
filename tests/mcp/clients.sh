#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Clients that people use, from npm, each doing a whole task in a real machine. clients.sh BUILD
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mayfly=$(realpath "$1")/mayfly
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mayfly/mcp-clients
export MAYFLY_HOME MAYFLY=$mayfly
MAYFLY_HOME=$(mktemp -d)
server=
end() {
	[ -z "$server" ] || kill "$server"
	"$mayfly" rm --force box || :
	rm -rf "$MAYFLY_HOME"
}
trap end EXIT

"$here/npm.sh" "$cache" @modelcontextprotocol/sdk@1.32.2 @modelcontextprotocol/client@2.4.0 \
	@modelcontextprotocol/inspector-cli@1.0.3 mcporter@0.9.0
echo "node $(node --version)"
"$mayfly" up --timeout 240s box
"$mayfly" access box exec
coproc SERVER { exec "$mayfly" mcp --http box; }
server=$SERVER_PID
read -r MCP_URL <&"${SERVER[0]}"
read -r _ token <&"${SERVER[0]}"
MCP_TOKEN=$(cat "$token")
export MCP_URL MCP_TOKEN
# Packages are found beside the script that asks for them.
cp "$here/clients.mjs" "$cache/"
node "$cache/clients.mjs"
"$mayfly" audit verify box
