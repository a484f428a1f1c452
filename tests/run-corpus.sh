#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Replays the kept corpus of each fuzzer. A fuzzer without a corpus fails: it would prove nothing.
set -u
here=$(dirname "$0")
bad=0
for f in "$@"; do
	name=${f##*/}
	name=${name%_fuzz}
	set -- "$here/fuzz/corpus/$name"/*
	if [ ! -e "$1" ]; then
		printf 'FAIL %s: no corpus in tests/fuzz/corpus/%s\n' "$name" "$name"
		bad=1
		continue
	fi
	if out=$(timeout -k 5 300 "$f" "$@" 2>&1); then
		printf 'ok   %-28s %s\n' "${f##*/}" "$(printf '%s\n' "$out" | tail -n 1)"
	else
		printf 'FAIL %s\n%s\n' "${f##*/}" "$out"
		bad=1
	fi
done
exit $bad
