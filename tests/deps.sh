#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs those of the named Debian packages that are missing; if it may not, says how.
set -eu
missing=
for p in "$@"; do
	case $(dpkg-query -W -f '${Status}' "$p" 2>/dev/null) in
	*' installed') ;;
	*) missing="$missing $p" ;;
	esac
done
[ -n "$missing" ] || exit 0
cmd="apt-get install --yes --no-install-recommends$missing"
if [ "$(id -u)" -ne 0 ]; then
	echo "These Debian packages are missing. As root, run:" >&2
	echo "  apt-get update && $cmd" >&2
	exit 1
fi
echo "installing:$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# The list of packages may never have been fetched, or be old.
if ! { apt-get update && $cmd; } >"$log" 2>&1; then
	tail -n 20 "$log" >&2
	exit 1
fi
