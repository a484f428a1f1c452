# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Two processes that keep AVX (and AVX-512) state live do not see each other's.
. "$(dirname "$0")/lib.sh"

out=$("$MAYFLY" run --timeout "$GUEST_TIMEOUT" -i -- \
	sh -c 'cat >/tmp/avx && chmod +x /tmp/avx && exec /tmp/avx' <"$TEST_BUILD/tests/guest/avx_pair")
status=$?
if [ "$status" -eq 2 ]; then
	skip "avx_pair: $out"
	finish
fi
equal "avx_pair: status" "$status" 0
contains "avx_pair: verdict" "$out" "avx ok"
echo "$out"
check "nothing left" nothing_left
finish
