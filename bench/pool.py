#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pools: pool.py MAYFLY [ROUNDS [TASKS [SIZE]]]

How long a lease takes, p50 and p95; what a machine that waits costs in memory and CPU time, paused as
it is and running; exec p95 in a machine alone, and while a pool refills beside it; TASKS (default 64)
at once from one pool of SIZE (default 8). Times are for reading, not for gating.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

mayfly = os.path.abspath(sys.argv[1])
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 40
tasks = int(sys.argv[3]) if len(sys.argv) > 3 else 64
size = int(sys.argv[4]) if len(sys.argv) > 4 else 8
home = tempfile.mkdtemp(prefix="mayfly-bench-")
os.environ["MAYFLY_HOME"] = home
HZ = os.sysconf("SC_CLK_TCK")


def run(*args, check=True):
    return subprocess.run([mayfly, *args], check=check, capture_output=True, text=True)


def stats():
    return json.loads(run("pool", "stats", "p", "--json").stdout)


def wait_ready(nr, patience=600):
    end = time.monotonic() + patience
    while stats()["ready"] < nr:
        if time.monotonic() > end:
            sys.exit("the pool does not fill: see " + stats()["dir"] + "/serve.log")
        time.sleep(0.05)


def percentiles(samples):
    samples = sorted(samples)
    return "p50 %8.3f ms   p95 %8.3f ms   (%d)" % (
        samples[(len(samples) - 1) // 2] * 1e3, samples[(len(samples) * 95 + 99) // 100 - 1] * 1e3,
        len(samples))


def times(count, *args):
    samples = []
    for _ in range(count):
        start = time.monotonic()
        run(*args)
        samples.append(time.monotonic() - start)
    return samples


def monitors():
    machines = json.loads(run("ps", "--json").stdout)
    return [m["pid"] for m in machines if m.get("pool") and m["state"] == "running"]


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / HZ


def memory_kib(pid):
    kib = {}
    for line in open(f"/proc/{pid}/smaps_rollup"):
        words = line.split()
        if words[0].endswith(":") and words[-1] == "kB":
            kib[words[0][:-1]] = int(words[1])
    return kib["Pss"], kib["Private_Dirty"]


def waiting():
    pid = monitors()[0]
    pss, private = memory_kib(pid)
    before, start = cpu_seconds(pid), time.monotonic()
    time.sleep(5)
    print("one that waits:           %d KiB PSS, %d KiB of its own; %.2f %% of a CPU" % (
        pss, private, 100 * (cpu_seconds(pid) - before) / (time.monotonic() - start)))


def leased():
    waiting = set(os.listdir(home + "/pools/p/ready"))
    return [m["pid"] for m in json.loads(run("ps", "--json").stdout)
            if m.get("pool") and m["state"] == "running" and m["name"] not in waiting]


def idle_running():
    holder = subprocess.Popen([mayfly, "run", "--pool", "p", "--", "sh", "-c", "echo; exec sleep 1000"],
                              stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()  # its command runs
        wait_ready(4)  # and the next one is made, so that it is not taken for that
        pid, = leased()
        before, start = cpu_seconds(pid), time.monotonic()
        time.sleep(5)  # what is measured
        print("one that runs, idle:      %.2f %% of a CPU" % (
            100 * (cpu_seconds(pid) - before) / (time.monotonic() - start)))
    finally:
        holder.terminate()
        holder.wait()


def leases():
    run("pool", "create", "p", "--size", "4", "--memory", "96M")
    wait_ready(4)
    total = []
    for _ in range(rounds):
        wait_ready(1)
        total += times(1, "run", "--pool", "p", "--", "true")
    s = stats()
    print("leases:                   p50 %8.3f ms   p95 %8.3f ms   (%d; %d misses)" % (
        s["lease_p50_us"] / 1e3, s["lease_p95_us"] / 1e3, s["hits"], s["misses"]))
    print("run --pool -- true:      ", percentiles(total))
    print("refills:                  p50 %8.3f ms   p95 %8.3f ms   (%d)" % (
        s["refill_p50_us"] / 1e3, s["refill_p95_us"] / 1e3, s["refills"]))
    wait_ready(4)
    waiting()
    idle_running()
    print("run, warm, no pool:      ", percentiles(times(
        max(rounds // 4, 3), "run", "--memory", "96M", "--", "true")))
    run("pool", "rm", "p")


def beside_refills():
    run("up", "m", "--memory", "96M")
    alone = times(rounds, "exec", "m", "--", "true")
    run("pool", "create", "p", "--size", "16", "--memory", "96M")
    beside = []
    # It fills for as long as we look: what is there is taken away again.
    while len(beside) < rounds:
        if stats()["ready"] >= 16:
            run("pool", "rm", "p")
            run("pool", "create", "p", "--size", "16", "--memory", "96M")
        beside += times(1, "exec", "m", "--", "true")
    print("exec alone:              ", percentiles(alone))
    print("exec, a pool refills:    ", percentiles(beside))
    run("pool", "rm", "p")
    run("rm", "--force", "m")


def many():
    run("pool", "create", "p", "--size", str(size), "--memory", "96M")
    wait_ready(size)
    path = home + "/tasks.jsonl"
    with open(path, "w") as file:
        for i in range(tasks):
            file.write(json.dumps({"id": f"t{i}", "pool": "p", "commands": [f"echo {i} >/tmp/x"],
                                   "verifier": {"command": f"test $(cat /tmp/x) = {i}"}}) + "\n")
    start = time.monotonic()
    done = run("eval", "run", path, "--jobs", str(tasks), "--json", "--out", home + "/out",
               check=False)
    s = stats()
    print("%d tasks, a pool of %d:    %.1f s; %s; %d hits, %d misses" % (
        tasks, size, time.monotonic() - start, " ".join(done.stdout.split()), s["hits"], s["misses"]))
    print("  leases:                 p50 %8.3f ms   p95 %8.3f ms" % (
        s["lease_p50_us"] / 1e3, s["lease_p95_us"] / 1e3))
    if done.returncode:
        print(done.stderr)
    run("pool", "rm", "p")


try:
    leases()
    beside_refills()
    many()
finally:
    for pool in json.loads(run("pool", "ls", "--json").stdout):
        run("pool", "rm", pool["name"], check=False)
    run("rm", "--force", "m", check=False)
    shutil.rmtree(home)
