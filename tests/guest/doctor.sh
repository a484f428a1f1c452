# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# mayfly doctor on this host, where guests do run.
. "$(dirname "$0")/lib.sh"

"$MAYFLY" doctor >out.txt
equal "doctor: status" $? 0
contains "doctor: verdict" "$(cat out.txt)" "can run machines here"
"$MAYFLY" doctor --json >out.json
equal "doctor --json: status" $? 0
check "doctor --json: valid" python3 -c '
import json
d = json.load(open("out.json"))
assert d["ready"] is True
assert d["host"] in ("hardware", "emulated ring 0"), d["host"]
names = [c["name"] for c in d["checks"]]
assert names[:2] == ["kvm", "io_uring"], names
assert all(c["cure"] for c in d["checks"] if c["verdict"] != "ok" and c["name"] != "memory")'
MAYFLY_KERNEL=/no/such/kernel "$MAYFLY" doctor >out.txt
equal "doctor without a kernel: status" $? 1
contains "doctor without a kernel: cure" "$(cat out.txt)" "make kernel"
check "nothing left" nothing_left
finish
