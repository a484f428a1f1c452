#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds what can be counted to what it may cost: budgets.py [--write] BUILD

Counts exits, system calls, packets, bytes and sizes of a cold start, a warm start and an exec, and
compares them with budgets.json, host kind by host kind. Ends with 1 and a table where one is
exceeded; --write records what is counted now, with the allowance that is in the file. Times have no
place here: they depend on who else is at work.
"""
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

BUDGETS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "budgets.json")
ROUNDS = 3
EXECS = 10


def run(*argv):
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)}: {done.returncode}: {done.stderr.strip()}")
    return done


def start(mayfly, *options):
    """The counts of one start."""
    monitor = json.loads(run(mayfly, "run", "--json", *options, "--", "true").stderr.splitlines()[-1])["monitor"]
    counts = {f"exits, {kind}": n for kind, n in monitor["exits"].items()}
    counts["monitor without guest memory, KiB"] = monitor["monitor_rss_kib"]
    return counts


def system_calls(mayfly, work):
    """Of a warm start, the command's and the monitor's together."""
    run("strace", "-f", "-c", "-o", f"{work}/calls", mayfly, "run", "--", "true")
    with open(f"{work}/calls", encoding="ascii") as f:
        return {"system calls": int(re.search(r"^100\.00\s+\S+\s+(?:\d+\s+)?(\d+)\s.*total$", f.read(), re.M)[1])}


def medians(samples):
    return {name: statistics.median(s[name] for s in samples) for name in samples[0]}


def of_exec(mayfly):
    def stats():
        told = json.loads(run(mayfly, "stats", "--json", "bench").stdout)
        return {f"{part}, {key}": n for part in ("exits", "vsock") for key, n in told[part].items()}
    # The least of several: a guest that has to wait for its turn ticks meanwhile.
    costs = []
    before = stats()
    for _ in range(EXECS + 1):
        run(mayfly, "exec", "bench", "--", "true")
        after = stats()
        costs.append({name: n - before[name] for name, n in after.items()})
        before = after
    return {name: min(cost[name] for cost in costs[1:]) for name in before}


def count(build):
    mayfly = f"{build}/mayfly"
    work = tempfile.mkdtemp(prefix="mayfly-budgets-")
    os.environ["MAYFLY_HOME"] = f"{work}/home"
    try:
        start(mayfly)  # makes the snapshot that warm starts go on from
        counts = {"cold start": medians([start(mayfly, "--cold") for _ in range(ROUNDS)]),
                  "warm start": medians([start(mayfly) for _ in range(ROUNDS)])}
        if shutil.which("strace"):
            counts["warm start"] |= system_calls(mayfly, work)
        else:
            print("not counted: system calls (strace is missing)")
        run(mayfly, "up", "--memory", "256M", "bench")
        counts["exec"] = of_exec(mayfly)
    finally:
        subprocess.run([mayfly, "rm", "--force", "bench"], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(work, ignore_errors=True)
    counts["bytes"] = {name: os.path.getsize(f"{build}/{name}")
                       for name in ("mayfly", "mayfly-agent", "initramfs.cpio", "vmlinux")}
    return {f"{what}: {name}": n for what, of_it in counts.items() for name, n in of_it.items()}


def main():
    write = sys.argv[1] == "--write"
    build = os.path.abspath(sys.argv[-1])
    # The doctor's status speaks of more than we ask.
    kind = json.loads(subprocess.run([f"{build}/mayfly", "doctor", "--json"], capture_output=True,
                                     text=True, check=False).stdout)["host"]
    with open(BUDGETS, encoding="utf-8") as f:
        budgets = json.load(f)
    counts = count(build)
    if write:
        for name, n in counts.items():
            least = budgets["allowance"].get(name.partition(": ")[0], 0)
            budgets["at most"].setdefault(kind, {})[name] = round(n * (1 + budgets["share"]) + least + 0.5)
        with open(BUDGETS, "w", encoding="utf-8") as f:
            json.dump(budgets, f, indent=1)
            f.write("\n")
    at_most = budgets["at most"].get(kind)
    if at_most is None:
        print(f"skip: no budgets for a host of the kind '{kind}': bench/budgets.py --write {sys.argv[-1]}")
        return 0
    over = 0
    print(f"{kind:52} {'counted':>12} {'at most':>12}")
    for name, n in counts.items():
        bad = name not in at_most or n > at_most[name]
        over += bad
        print(f"{name:52} {n:12g} {at_most.get(name, 'no budget'):>12}{'  OVER' if bad else ''}")
    if over:
        print(f"{over} over budget. Mend it, or say in the commit why it is worth it: bench/budgets.py --write")
    return 1 if over else 0


sys.exit(main())
