#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cold starts, stage by stage: start.py MAYFLY [ROUNDS]

Medians and extremes of `mayfly run -- true`, with what was counted beside what was timed. The first
round warms the caches of the host and is left out. Times are for reading, not for gating.
"""
import json
import os
import statistics
import subprocess
import sys

STAGES = [
    ("start_to_first_run_us", "process start to first KVM_RUN, wall"),
    ("cpu_us", "  the same, CPU time of the monitor"),
    ("first_run_to_ready_us", "first KVM_RUN to agent ready"),
    ("ready_to_answer_us", "agent ready to the command's end"),
    ("answer_to_end_us", "the command's end to all gone"),
    ("total_us", "in all"),
]


def one(mayfly):
    done = subprocess.run([mayfly, "run", "--json", "--timeout", "5m", "--", "true"],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"mayfly run failed ({done.returncode}): {done.stderr.strip()}")
    sample = json.loads(done.stderr.strip().splitlines()[-1])
    sample["cpu_us"] = sample["monitor"]["start_cpu_ns"] // 1000
    return sample


def main():
    mayfly = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    samples = [one(mayfly) for _ in range(rounds + 1)][1:]
    monitor = samples[-1]["monitor"]
    load = os.getloadavg()[0]
    print(f"host: {monitor['host']}; {rounds} rounds; load {load:.1f} on {os.cpu_count()} CPUs")
    if load > os.cpu_count():
        print("warning: the machine was busy, so the times say little")
    print(f"{'ms':44} {'median':>9} {'min':>9} {'max':>9}")
    for key, text in STAGES:
        values = [s[key] / 1000 for s in samples]
        print(f"{text:44} {statistics.median(values):9.2f} {min(values):9.2f} {max(values):9.2f}")
    print("exits of one run: " + ", ".join(f"{k} {v}" for k, v in monitor["exits"].items()))
    print(f"monitor without guest memory: {monitor['monitor_rss_kib']} KiB resident")
    build = os.path.dirname(os.path.abspath(mayfly))
    for name in ("mayfly", "mayfly-agent", "initramfs.cpio", "vmlinux"):
        path = os.path.join(build, name)
        if os.path.exists(path):
            print(f"size of {name}: {os.path.getsize(path)} bytes")


main()
