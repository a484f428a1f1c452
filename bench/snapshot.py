#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Snapshots: snapshot.py MAYFLY [ROUNDS [SIZE[+MIB]...]]

With +MIB so much of the memory is filled before, at most half.
Saving, whole, as a diff and live, idle and while the guest writes, with the time that the guest stands
still; forks by each way of reading
memory, stage by stage: from the command's start to the monitor's, to the state loaded, the first
instruction of the guest, awake, the first exec answered; with page faults, exits and private memory
of the clone. Then warm starts of `mayfly run`. Times are for reading, not for gating.
"""
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

KIB, MIB = 1 << 10, 1 << 20


def run(*argv, text=None):
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)}: {done.stderr.decode()}")
    return done.stderr.decode() if text == "stderr" else done.stdout.decode()


def ask(home, name, method):
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as sock:
        os.chdir(f"{home}/vms/{name}/run")
        sock.connect("control.sock")
        os.chdir(here)
        sock.sendall(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method}).encode() + b"\n")
        reply = b""
        while not reply.endswith(b"\n"):
            reply += sock.recv(65536)
    return json.loads(reply)["result"]


def rollup(pid):
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as f:
        kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", f.read(), re.M))
    return {"private": int(kib["Private_Dirty"]) + int(kib["Private_Clean"]),
            "rss": int(kib["Rss"]), "pss": int(kib["Pss"])}


def quantiles(values):
    values = sorted(values)
    at = lambda q: values[min(len(values) - 1, int(len(values) * q))]
    return statistics.median(values), at(0.95), at(0.99)


def row(name, values):
    print(f"  {name:40} {'%10.2f %10.2f %10.2f' % quantiles(values)}")


# Writes some MiB again and again, until it is killed.
WRITER = "(while :; do head -c 4000000 /dev/zero | tr '\\0' x >/tmp/busy; done) >/dev/null 2>&1 & echo $!"


def saves(mayfly, rounds, busy):
    writer = run(mayfly, "exec", "bench", "--", "sh", "-c", WRITER).strip() if busy else None
    for kind in ([], ["--live"], ["--diff"], ["--compress"], ["--diff", "--compress"]):
        if busy and "--compress" in kind:
            continue
        rows = {}
        for _ in range(rounds):
            if "--diff" in kind and not busy:
                # Something to write: a little, and what the command itself touches.
                run(mayfly, "exec", "bench", "--", "sh", "-c", "head -c 100000 /dev/urandom >/tmp/x")
            start = time.monotonic_ns()
            info = json.loads(run(mayfly, "snapshot", "--json", *kind, "bench"))
            told = {"ms": (time.monotonic_ns() - start) / 1e6,
                    "blackout ms": info["blackout_ns"] / 1e6,
                    "MiB written": info["written_bytes"] / MIB}
            live = info.get("live")
            if live:
                told |= {"rounds": len(live["rounds"]),
                         "MiB copied again": (sum(r["bytes"] for r in live["rounds"][1:]) +
                                              live["last_bytes"]) / MIB,
                         "MiB at the end": live["last_bytes"] / MIB,
                         "written from a fork": live["forked"]}
            for name, value in told.items():
                rows.setdefault(name, []).append(value)
        what = (" ".join(kind) or "whole") + (", while it writes" if busy else "")
        for name, values in rows.items():
            row(f"save, {what}: {name}", values)
        run(mayfly, "snapshots", "prune", "--keep", "1", "bench")
    if busy:
        run(mayfly, "exec", "bench", "--", "kill", writer)
        return
    # The chain is of no more use.
    run(mayfly, "snapshot", "bench", "base")
    run(mayfly, "snapshot", "--compress", "bench", "small")


def forks(mayfly, home, rounds, way, source):
    stages = {}
    for _ in range(rounds):
        start = time.monotonic_ns()
        run(mayfly, "fork", "--memory-restore", way, source, "clone")
        forked = time.monotonic_ns()
        before = ask(home, "clone", "status")
        exits = ask(home, "clone", "stats")["exits"]
        idle = rollup(before["pid"])
        first = time.monotonic_ns()
        run(mayfly, "exec", "clone", "--", "true")
        answered = time.monotonic_ns()
        after = ask(home, "clone", "status")
        used = rollup(before["pid"])
        at = before["times"]
        for name, value in {
            "ms to the monitor's start": (at["started_ns"] - start) / 1e6,
            "ms to the state loaded": (at["loaded_ns"] - at["started_ns"]) / 1e6,
            "ms to the first instruction": (at["first_run_ns"] - at["loaded_ns"]) / 1e6,
            "ms to awake": (at["awake_ns"] - at["first_run_ns"]) / 1e6,
            "ms to the command's end": (forked - at["awake_ns"]) / 1e6,
            "ms of the first exec": (answered - first) / 1e6,
            "page faults of the monitor until awake": before["faults"]["minor"] +
                                                      before["faults"]["major"],
            "lazy faults until awake": before["faults"]["lazy"],
            "lazy faults, with the first exec": after["faults"]["lazy"],
            "frames prefetched": after["faults"]["prefetched"],
            "exits until awake": sum(exits.values()),
            "KiB private, awake": idle["private"],
            "KiB private, after an exec": used["private"],
            "KiB PSS, after an exec": used["pss"],
        }.items():
            stages.setdefault(name, []).append(value)
        run(mayfly, "rm", "--force", "clone")
    print(f" fork, {way}, of {source.split('@')[1]}")
    for name, values in stages.items():
        if any(values):
            row(name, values)


def warm(mayfly, rounds):
    stages = {}
    run(mayfly, "run", "--", "true")
    for _ in range(rounds):
        start = time.monotonic_ns()
        told = json.loads(run(mayfly, "run", "--json", "--", "true", text="stderr")
                          .splitlines()[-1])
        stages.setdefault("ms in all, as seen from outside", []).append(
            (time.monotonic_ns() - start) / 1e6)
        for key, value in told.items():
            if key.endswith("_us"):
                stages.setdefault("ms " + key[:-3].replace("_", " "), []).append(value / 1000)
        stages.setdefault("exits", []).append(sum(told["monitor"]["exits"].values()))
    print("warm starts: mayfly run -- true")
    for name, values in stages.items():
        row(name, values)


def main():
    mayfly = os.path.abspath(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    sizes = sys.argv[3:] or ["64M", "256M", "1G", "4G"]
    home = tempfile.mkdtemp(prefix="mayfly-bench-")
    os.environ["MAYFLY_HOME"] = home
    load = os.getloadavg()[0]
    print(f"{rounds} rounds; load {load:.1f} on {os.cpu_count()} CPUs")
    if load > os.cpu_count():
        print("warning: the machine is busy, so the times say little")
    try:
        print(f"  {'':40} {'p50':>10} {'p95':>10} {'p99':>10}")
        warm(mayfly, rounds)
        for size in sizes:
            size, _, filled = size.partition("+")
            run(mayfly, "up", "--memory", size, "bench")
            if filled:
                run(mayfly, "exec", "bench", "--", "sh", "-c",
                    f"yes mayfly | head -c {int(filled) * MIB} >/tmp/filled")
            print(f"{size} of memory" + (f", {filled} MiB of it filled" if filled else ""))
            saves(mayfly, rounds, True)
            saves(mayfly, rounds, False)
            for way, source in (("mapped", "base"), ("lazy", "base"), ("lazy", "small"),
                                ("eager", "base")):
                forks(mayfly, home, rounds, way, f"bench@{source}")
            run(mayfly, "rm", "--force", "bench")
    finally:
        subprocess.run([mayfly, "rm", "--force", "bench", "clone"], stderr=subprocess.DEVNULL,
                       check=False)
        shutil.rmtree(home, ignore_errors=True)


main()
