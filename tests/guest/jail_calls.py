# SPDX-License-Identifier: Apache-2.0
"""Which rows of a monitor's table of system calls its traces do not use.

jail_calls.py TABLE.json TRACE…: TABLE is `mayfly doctor --calls --json`, each TRACE a thread's, by
`strace -ff -e raw=all`. What counts is what a thread did after it was confined. Prints the rows
that no thread needed, and exits with 1 if there are any.
Rows for emulated ring 0 are left out with --hardware; those that are needed in failures always.
"""
import collections
import json
import re
import sys

CALL = re.compile(r"(?:<\.\.\. )?(\w+)(?: resumed>|\()(.*)")


def calls(path):
    """The calls of a trace, with their arguments, of a thread; and which kind it is."""
    kind, done = "vcpu", []
    for line in open(path, errors="replace"):
        match = CALL.match(line)
        if not match or "resumed>" in line:
            continue
        name = match[1]
        args = [int(arg, 0) & 0xFFFFFFFF for arg in re.findall(r"\b(?:0x[0-9a-f]+|\d+)", match[2].split(")")[0])]
        if name == "unshare":
            kind = "loop"
        elif name == "ioctl" and args[1] & 0xFFFF in (0xAA03, 0xAA04):  # UFFDIO_COPY, UFFDIO_ZEROPAGE
            kind = "lazy"
        elif name == "close_range":
            kind = "save"
        done.append((name, args))
    return kind, done


def main():
    hardware = "--hardware" in sys.argv
    paths = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    table = json.load(open(paths[0], encoding="utf8"))
    used = collections.Counter()
    for path in paths[1:]:
        kind, done = calls(path)
        # The forked process is under the loop's filter until it has its own.
        under = "loop" if kind == "save" else None
        for name, args in done:
            if under:
                rows = [row for row in table if row["call"] == name and under in row["threads"].split(",") and
                        (row["arg"] < 0 or args[row["arg"]] == row["value"])]
                for row in rows:
                    used[row["row"], under] += 1
            if name == "seccomp" and args[0] == 1:
                under = kind
    unused = [f"{row['row']} ({kind})" for row in table for kind in row["threads"].split(",")
              if row["when"] != "rare" and not (hardware and row["when"] == "emulated ring 0") and
              not used[row["row"], kind]]
    print(f"{sum(used.values())} calls, {len(used)} of {sum(len(r['threads'].split(',')) for r in table)} uses")
    for name in unused:
        print("unused:", name)
    return 1 if unused else 0


if __name__ == "__main__":
    sys.exit(main())
