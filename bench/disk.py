#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Disks, side by side with QEMU's microvm: disk.py BUILD [ROUNDS]

Same kernel, image and file (a raw one in memory, through the page cache, io_uring in both), in turns
within one run, of which the first round is left out; ROUNDS 0 only counts. fio in the guest; then a
fixed number of requests with what they cost the monitor in exits and system calls, which are the
figures to trust. Ratios above 1 are to mayfly's credit. In the lab: make bench-disk.
"""
import json
import os
import shutil
import sys
import tempfile

sys.dont_write_bytecode = True
from machines import Mayfly, Qemu, call, mount_tools, prepare, run, show, tools_image  # noqa: E402

SECONDS = 3
SIZE_MIB = 128
JOBS = [(f"{bs} {rw}, depth {depth}", rw, bs, depth) for rw, bs, depth in (
    ("randread", "4k", 1), ("randwrite", "4k", 1), ("randread", "4k", 32), ("randwrite", "4k", 32),
    ("read", "1M", 4), ("write", "1M", 4))]


def fio(machine, data, rw, bs, depth, *more):
    text = machine.exec("/bin/sh", "-c", " ".join((
        call("fio"), f"--name=b --filename={data} --thread --ioengine=libaio --direct=1",
        f"--rw={rw} --bs={bs} --iodepth={depth} --size={SIZE_MIB}M --output-format=json", *more)))
    job = json.loads(text[text.index("{"):])["jobs"][0]
    return job["write" if "write" in rw else "read"]


def main():
    build = os.path.abspath(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    work = tempfile.mkdtemp(prefix="mayfly-bench-", dir="/dev/shm")
    os.environ["MAYFLY_HOME"] = f"{work}/home"
    prepare()
    speed = {name: ([], []) for name, *_ in JOBS}
    exits, syscalls = ({name: ([], []) for name, *_ in JOBS} for _ in range(2))
    try:
        tools_image(f"{work}/tools.img", work, "fio")
        with open(f"{work}/data.img", "wb") as f:
            for _ in range(SIZE_MIB):
                f.write(os.urandom(1 << 20))
        disks = ((f"{work}/data.img", True), (f"{work}/tools.img", False))
        for turn in range(rounds + 1):
            for which, kind in enumerate((Mayfly, Qemu)):
                machine = kind(build, disks)
                machine.start()
                data = mount_tools(machine)
                for name, rw, bs, depth in JOBS:
                    got = fio(machine, data, rw, bs, depth, f"--time_based --runtime={SECONDS}")
                    if turn:
                        speed[name][which].append(got["bw_bytes"] / (1 << 20))
                    if turn != rounds:
                        continue
                    # The figures that do not depend on the time.
                    size = "128M" if bs == "1M" else "4M" if depth == 1 else "16M"
                    got, nr_exits, nr_calls = machine.cost(
                        lambda: fio(machine, data, rw, bs, depth, f"--io_size={size}"))
                    exits[name][which].append(nr_exits / got["total_ios"])
                    syscalls[name][which].append(nr_calls / got["total_ios"])
                machine.stop()
            print(f"round {turn} of {rounds} done", file=sys.stderr)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; {rounds} rounds;",
              run("qemu-system-x86_64", "--version").splitlines()[0])
        show("MiB/s", speed, "more")
        show("exits a request (fio's own included)", exits, "less")
        show("system calls of the monitor a request", syscalls, "less")
    finally:
        shutil.rmtree(work, ignore_errors=True)


main()
