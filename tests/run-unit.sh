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
	# cmocka names these twice: as they end, and in its summary.
	f=$(grep '^\[  FAILED  \] [A-Za-z_0-9]*$' "$log" | sort -u | wc -l)
	s=$(grep '^\[  SKIPPED \] [A-Za-z_0-9]*$' "$log" | sort -u | wc -l)
	passed=$((passed + p)) skipped=$((skipped + s))
	if [ $rc -ne 0 ] || [ $((p + s)) -eq 0 ]; then
		bad=1
		[ "$f" -eq 0 ] && f=1
		failed=$((failed + f))
		printf 'FAIL %s (exit %d)\n' "${t##*/}" $rc
		cat "$log"
	else
		printf 'ok   %-28s %3d tests\n' "${t##*/}" "$p"
		[ "$s" -eq 0 ] || grep '^skipped: ' "$log" | sort | uniq -c
	fi
done
printf 'unit: %d passed, %d failed, %d skipped\n' $passed $failed $skipped
exit $bad
