#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Networks and vsock, side by side with QEMU's microvm: net.py BUILD [ROUNDS]

Same kernel and image, a tap each (both in user space), vsock of ours against vhost-vsock in the
kernel; in turns within one run, of which the first round is left out; ROUNDS 0 only counts. Ratios
above 1 are to mayfly's credit; system calls and exits are the figures to trust, though a slow run
has more exits of the guest's timer. In the lab: make bench-net.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
from machines import Mayfly, Qemu, call, prepare, run, show, tools_image  # noqa: E402

SECONDS = 3
TAP = "mfbench"
PORT = 5000
VSOCK_BYTES = 32 << 20
PINGS = 300
TCP_BYTES = 16 << 20


def iperf(machine, *more):
    server = subprocess.Popen(["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE,
                              text=True)
    while "listening" not in server.stdout.readline():
        pass
    text = machine.exec("/bin/sh", "-c", call("iperf3") + " -c 10.78.0.1 -J " + " ".join(more))
    server.communicate()
    return json.loads(text)["end"]["sum_received"]


def make_tap():
    run("ip", "link", "set", "lo", "up")
    run("ip", "tuntap", "add", TAP, "mode", "tap", "vnet_hdr")
    run("ip", "addr", "add", "10.78.0.1/24", "dev", TAP)
    run("ip", "link", "set", TAP, "up")


def serve(machine):
    """tests/guest/stream in the guest, which outlives the request that starts it."""
    machine.exec("/bin/sh", "-c", "(setsid /mnt/stream serve vsock:4294967295:5000 >/tmp/served "
                 "2>&1 </dev/null &) ; until grep -q ready /tmp/served; do sleep 0.1; done")


def timed_stream(stream, verb, address, amount):
    start = time.monotonic()
    out = run(stream, verb, address, str(amount))
    return float(out.split()[0]) if verb == "pings" else \
        amount / (1 << 20) / (time.monotonic() - start)


def count(machine, rows, which, name, work, per):
    """The exits and system calls of work, each per unit."""
    _, *costs = machine.cost(work)
    for kind, nr in zip(rows, costs):
        kind.setdefault(name, ([], []))[which].append(nr / per)


def main():
    build = os.path.abspath(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    stream = f"{build}/tests/guest/stream"
    work = tempfile.mkdtemp(prefix="mayfly-bench-", dir="/dev/shm")
    os.environ["MAYFLY_HOME"] = f"{work}/home"
    prepare()
    speed, delay, counted = {}, {}, ({}, {})
    try:
        os.makedirs(f"{work}/tools")
        shutil.copy(stream, f"{work}/tools/stream")
        tools_image(f"{work}/tools.img", work, "iperf3")
        make_tap()
        for turn in range(rounds + 1):
            for which, kind in enumerate((Mayfly, Qemu)):
                machine = kind(build, ((f"{work}/tools.img", False),), TAP)
                machine.start()
                machine.exec("/bin/mount", "-t", "erofs", "-o", "ro", "/dev/vda", "/mnt")
                serve(machine)
                address = machine.stream(PORT)
                for name, more in (("TCP over tap, out of the guest", ()),
                                   ("TCP over tap, into it", ("-R",))):
                    got = iperf(machine, "-t", str(SECONDS), *more)
                    if turn:
                        speed.setdefault(name, ([], []))[which].append(
                            got["bits_per_second"] / 8 / (1 << 20))
                    else:
                        count(machine, counted, which, name,
                              lambda m=more: iperf(machine, "-n", str(TCP_BYTES), *m),
                              TCP_BYTES >> 20)
                for name, verb in (("vsock, out of the guest", "get"), ("vsock, into it", "put")):
                    got = timed_stream(stream, verb, address, VSOCK_BYTES)
                    if turn:
                        speed.setdefault(name, ([], []))[which].append(got)
                    else:
                        count(machine, counted, which, name,
                              lambda v=verb: timed_stream(stream, v, address, VSOCK_BYTES),
                              VSOCK_BYTES >> 20)
                got = timed_stream(stream, "pings", address, PINGS)
                if turn:
                    delay.setdefault("vsock, a byte there and back", ([], []))[which].append(got)
                machine.stop()
            print(f"round {turn} of {rounds} done", file=sys.stderr)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; {rounds} rounds;",
              run("qemu-system-x86_64", "--version").splitlines()[0])
        show("MiB/s", speed, "more")
        show("us", delay, "less")
        show("exits a MiB", counted[0], "less")
        show("system calls of the monitor a MiB", counted[1], "less")
    finally:
        subprocess.run(["ip", "link", "del", TAP], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(work, ignore_errors=True)


main()
