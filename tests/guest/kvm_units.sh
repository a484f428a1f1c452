# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The tests of the KVM side (tests/kvm), which bring guests of a few instructions along: a line for
# each test of each program.
. "$(dirname "$0")/lib.sh"

for source in "$(dirname "$0")"/../kvm/*_test.c; do
	unit=$(basename "$source" _test.c)
	"$TEST_BUILD/tests/kvm/${unit}_test" >"$unit.log" 2>&1
	status=$?
	sed -n -e "s/^\[       OK \] /ok $unit: /p" -e "s/^\[  SKIPPED \] \([a-z_0-9]*\)$/skip $unit: \1/p" \
		-e "s/^\[  FAILED  \] \([a-z_0-9]*\)$/FAIL $unit: \1/p" "$unit.log" | sort -u
	if [ $status -ne 0 ]; then
		fail "$unit: exit $status"
		cat "$unit.log"
	fi
done
finish
