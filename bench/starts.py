# SPDX-License-Identifier: Apache-2.0
"""Starts of machines, stage by stage: what report.py measures first.

A start is one throwaway machine that runs `true`: cold (a boot), warm (from the snapshot that is
kept of the guest that has just become ready), and under QEMU's microvm with the same kernel, image
and agent where this host's KVM runs QEMU. They take turns within each round; the first round warms
the host's caches and is left out.
"""
import concurrent.futures
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import peers
from machines import Qemu

# As `mayfly run --json` names them, and as the report does.
STAGES = (
    ("start_to_first_run_us", "process start to first KVM_RUN"),
    ("first_run_to_awake_us", "first KVM_RUN to agent ready"),
    ("first_run_to_ready_us", "first KVM_RUN to agent ready"),
    ("ready_to_answer_us", "agent ready to first exec answered"),
    ("answer_to_end_us", "first exec answered to all gone"),
)
ANSWERED, IN_ALL = "process start to first exec answered", "in all"


def mayfly_run(mayfly, *options):
    """One `mayfly run -- true`. Returns its stages in ms, and what its monitor counted."""
    done = subprocess.run([mayfly, "run", "--json", "--timeout", "10m", *options, "--", "true"],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"mayfly run {' '.join(options)}: {done.returncode}: {done.stderr.strip()}")
    told = json.loads(done.stderr.strip().splitlines()[-1])
    values = {name: told[key] / 1000 for key, name in STAGES if key in told}
    values[IN_ALL] = told["total_us"] / 1000
    values[ANSWERED] = values[IN_ALL] - told["answer_to_end_us"] / 1000
    monitor = told["monitor"]
    values["CPU of the monitor to first KVM_RUN"] = monitor["start_cpu_ns"] / 1e6
    values["monitor without guest memory, KiB"] = monitor["monitor_rss_kib"]
    for kind, count in monitor["exits"].items():
        values[f"exits: {kind}"] = count
    return values


def other_run(machine):
    start = time.monotonic()
    machine.start(poll=0.001)
    answered = time.monotonic()
    machine.stop()
    return {ANSWERED: (answered - start) * 1000, IN_ALL: (time.monotonic() - start) * 1000}


def boxlite_run(boxes):
    answered, again, in_all = boxes.run()
    return {ANSWERED: answered, "one more exec": again, IN_ALL: in_all}


def ours(build, memory=None):
    """How a machine of ours can be started: name -> a function that starts one and returns its values."""
    mayfly = f"{build}/mayfly"
    size = ["--memory", memory] if memory else []
    return {"warm": lambda: mayfly_run(mayfly, *size), "cold": lambda: mayfly_run(mayfly, "--cold", *size)}


def theirs(record, build, undo):
    """And of others, where they are installed and this host runs them."""
    found = {}
    if record.host["kind"] == "emulated ring 0":
        record.skipped["QEMU"] = "this host's KVM does not run QEMU's guests (docs/hosts.md); in the lab it does"
    elif record.host["qemu"] == "none":
        record.skipped["QEMU"] = "qemu-system-x86_64 is not installed"
    else:
        found["QEMU microvm, cold"] = lambda: other_run(Qemu(build))
    if not shutil.which("firecracker"):
        record.skipped["Firecracker"] = "it is not on PATH"
    else:
        found["Firecracker, cold"] = lambda: other_run(peers.Firecracker(build))
    if not peers.boxlite():
        record.skipped["BoxLite"] = "its npm package is not installed (npm install -g @boxlite-ai/boxlite)"
    else:
        boxes = peers.Boxlite()
        undo.callback(boxes.close)
        found["BoxLite, its own kernel and agent"] = lambda: boxlite_run(boxes)
    return found


def alone(record, build, rounds, progress):
    """One at a time."""
    with contextlib.ExitStack() as undo:
        starts = ours(build) | theirs(record, build, undo)
        for turn in range(rounds + 1):
            for how, start in list(starts.items()):
                try:
                    values = start()
                except (RuntimeError, subprocess.TimeoutExpired) as e:
                    record.skipped[how] = str(e)
                    del starts[how]
                    continue
                if turn:
                    record.add("alone", how, turn, values)
            progress(f"starts alone: round {turn} of {rounds}")


def at_once(record, build, numbers, rounds, progress):
    """Many warm starts at the same moment: how long each takes."""
    mayfly = f"{build}/mayfly"
    for number in numbers:
        with concurrent.futures.ThreadPoolExecutor(number) as hands:
            for turn in range(rounds):
                for values in hands.map(lambda _: mayfly_run(mayfly), range(number)):
                    record.add("at once", "warm", turn, values, number)
        progress(f"starts, {number} at once")


def beside(record, build, burst, rounds, progress):
    """Commands in a machine that works, alone and while a burst of others starts."""
    mayfly = f"{build}/mayfly"
    run = lambda *argv: subprocess.run([mayfly, *argv], stdin=subprocess.DEVNULL, check=True,
                                       capture_output=True)
    run("up", "bench")
    def one_exec():
        start = time.monotonic()
        run("exec", "bench", "--", "true")
        return {"exec": (time.monotonic() - start) * 1000}
    try:
        one_exec()
        for turn in range(rounds):
            record.add("exec", "alone", turn, one_exec())
        with concurrent.futures.ThreadPoolExecutor(burst) as hands:
            starting = [hands.submit(mayfly_run, mayfly) for _ in range(burst)]
            turn = 0
            while not all(s.done() for s in starting):
                record.add("exec", f"while {burst} machines start", turn, one_exec())
                turn += 1
            for start in starting:
                start.result()
    finally:
        run("rm", "--force", "bench")
    progress(f"exec beside {burst} starts")


def scaling(record, build, sizes, rounds, progress):
    """Against the size of memory."""
    for mib in sizes:
        starts = ours(build, f"{mib}M")
        for turn in range(rounds + 1):
            for how, start in starts.items():
                values = start()
                if turn:
                    record.add("memory", how, turn, values, mib)
        progress(f"starts with {mib} MiB")


def chains(record, build, lengths, rounds, progress):
    """A fork, and its first exec, against the number of diffs that its snapshot stands on."""
    mayfly = f"{build}/mayfly"
    run = lambda *argv: subprocess.run([mayfly, *argv], stdin=subprocess.DEVNULL, check=True,
                                       capture_output=True, text=True)
    run("up", "bench")
    try:
        run("snapshot", "bench", "s0")
        for length in range(max(lengths) + 1):
            if length:
                run("exec", "bench", "--", "sh", "-c", "head -c 1000000 /dev/urandom >/tmp/x")
                run("snapshot", "--diff", "bench", f"s{length}")
            if length not in lengths:
                continue
            for turn in range(rounds + 1):
                start = time.monotonic()
                run("fork", f"bench@s{length}", "clone")
                forked = time.monotonic()
                run("exec", "clone", "--", "true")
                end = time.monotonic()
                run("rm", "--force", "clone")
                if turn:
                    record.add("chain", "fork", turn, {"fork": (forked - start) * 1000,
                                                       "fork to first exec": (end - start) * 1000}, length)
            progress(f"forks of a chain of {length}")
    finally:
        run("rm", "--force", "bench")


def idle(record, build, number, progress):
    """Memory of machines that do nothing: forks of one, after their first exec."""
    mayfly = f"{build}/mayfly"
    run = lambda *argv: subprocess.run([mayfly, *argv], stdin=subprocess.DEVNULL, check=True,
                                       capture_output=True, text=True)
    names = [f"clone{i}" for i in range(number)]
    run("up", "bench")
    try:
        run("snapshot", "bench", "base")
        run("fork", "bench@base", *names)
        for i, name in enumerate(names):
            run("exec", name, "--", "true")
        for i, name in enumerate(names):
            with open(f"{os.environ['MAYFLY_HOME']}/vms/{name}/run/lock", encoding="ascii") as f:
                pid = int(f.readline())
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as f:
                kib = {key: int(value.split()[0]) for key, value in
                       (line.split(":", 1) for line in f.readlines()[1:])}
            record.add("idle", "fork", i, {"PSS": kib["Pss"], "private": kib["Private_Dirty"] + kib["Private_Clean"],
                                           "RSS": kib["Rss"]})
    finally:
        run("rm", "--force", "bench", *names)
    progress(f"{number} idle clones")
