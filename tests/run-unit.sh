#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs each cmocka binary; a few lines each, all of the output when one fails.
set -u
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
bad=0 passed=0 failed=0 skipped=0
for t in "$@"; do
	timeout -k 5 600 "$t" >"$log" 2>&1
	rc=$?
	p=$(grep -c '^\[       OK \]' "$log")
	f=$(grep -c '^\[  FAILED  \] [A-Za-z_0-9]*$' "$log")
	s=$(grep -c '^\[  SKIPPED \] [A-Za-z_0-9]*$' "$log")
	passed=$((passed + p)) skipped=$((skipped + s))
	if [ $rc -ne 0 ] || [ "$p" -eq 0 ]; then
		bad=1
		[ "$f" -eq 0 ] && f=1
		failed=$((failed + f))
		printf 'FAIL %s (exit %d)\n' "${t##*/}" $rc
		cat "$log"
	else
		printf 'ok   %-28s %3d tests\n' "${t##*/}" "$p"
	fi
done
printf 'unit: %d passed, %d failed, %d skipped\n' $passed $failed $skipped
exit $bad
