#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs packages into a folder of their own, once. npm.sh FOLDER PACKAGE@VERSION…
set -eu
dir=$1
shift
[ ! -e "$dir/done" ] || [ "$(cat "$dir/done")" != "$*" ] || exit 0
command -v npm >/dev/null || { echo "npm is missing: apt-get install nodejs npm" >&2; exit 1; }
rm -rf "$dir"
mkdir -p "$dir"
echo '{"private": true}' >"$dir/package.json"
(cd "$dir" && npm install --no-audit --no-fund --loglevel error "$@" >&2)
echo "$*" >"$dir/done"
