# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Many commands, at once and in a row, and clients that vanish; FULL=1 for more of them.
. "$(dirname "$0")/lib.sh"

vm=many-test
cleanup() {
	"$MAYFLY" down $vm >/dev/null 2>&1
	"$MAYFLY" rm $vm >/dev/null 2>&1
}
trap cleanup EXIT
"$MAYFLY" create --memory 256M $vm >/dev/null && "$MAYFLY" up $vm >/dev/null || {
	fail "a machine for the tests"
	finish
}
# At once, in a row, killed. Where guest kernel code is interpreted a command takes a second of CPU time.
case "${FULL:-}$("$MAYFLY" doctor --json)" in
1*) amounts='300 3000 100' ;;
*'"emulated ring 0"'*) amounts='30 30 5' ;;
*) amounts='300 500 30' ;;
esac
# shellcheck disable=SC2086
python3 "$(dirname "$0")/many.py" "$MAYFLY" $vm $amounts || test_failed=1
cleanup
trap - EXIT
check "nothing left" nothing_left
finish
