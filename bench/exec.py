#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Commands in a machine that is up: exec.py MAYFLY [ROUNDS]

Latency of `exec true` from the command line and from within one process, beside that of a request
for which the agent starts nothing; throughput of output and of cp; what one exec costs the monitor
in exits. Times are for reading, not for gating.
"""
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

AGENT_PORT = 1024
REQUEST, REPLY, STDOUT, EXIT, ERROR = 1, 17, 18, 21, 22
MIB = 1 << 20


def receive(sock, length):
    data = bytearray()
    while len(data) < length:
        piece = sock.recv(length - len(data))
        if not piece:
            sys.exit("the agent closed the connection")
        data += piece
    return bytes(data)


def request(path, members):
    """One request on a connection of its own. Returns the last frame's type and payload, and how
    many bytes of output came before."""
    body = json.dumps({"v": 1, **members}).encode()
    output = 0
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(b"CONNECT %d\n" % AGENT_PORT)
        line = b""
        while not line.endswith(b"\n"):
            line += receive(sock, 1)
        sock.sendall(struct.pack("<IB3x", len(body), REQUEST) + body)
        while True:
            length, kind = struct.unpack("<IB3x", receive(sock, 8))
            payload = receive(sock, length)
            if kind == ERROR:
                sys.exit("the agent says: " + payload[8:].decode(errors="replace"))
            if kind in (REPLY, EXIT):
                return kind, payload, output
            if kind == STDOUT:
                output += length


def execute(path, argv):
    kind, payload, output = request(path, {"op": "exec", "argv": argv})
    if kind != EXIT or struct.unpack("<II", payload[:8]) != (0, 0):
        sys.exit(f"{argv} failed")
    return output


def row(name, seconds):
    ms = sorted(s * 1000 for s in seconds)
    p95, p99 = (ms[min(len(ms) - 1, int(len(ms) * q))] for q in (0.95, 0.99))
    print(f"{name:44} {statistics.median(ms):9.2f} {p95:9.2f} {p99:9.2f}")


def timed(rounds, call):
    call()  # what is there only the first time
    times = []
    for _ in range(rounds):
        start = time.monotonic()
        call()
        times.append(time.monotonic() - start)
    return times


def throughput(name, size, call):
    start = time.monotonic()
    call()
    print(f"{name:44} {size / MIB / (time.monotonic() - start):9.1f} MiB/s")


def check(*argv):
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)


def mcp(mayfly, machine, rows):
    """Calls of tools, on one session: (how it is told, rounds, tool, arguments) each."""
    check(mayfly, "access", machine, "exec")
    with subprocess.Popen([mayfly, "mcp", machine], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as session:
        def tool(name, arguments):
            session.stdin.write(json.dumps({
                "jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": name, "arguments": arguments}}).encode() + b"\n")
            session.stdin.flush()
            if json.loads(session.stdout.readline())["result"]["isError"]:
                sys.exit(f"{name} failed")

        for told, rounds, name, arguments in rows:
            row(told, timed(rounds, lambda name=name, arguments=arguments: tool(name, arguments)))
        session.stdin.close()


def up(mayfly, home, rounds):
    """Latency and throughput, on a machine that has a name."""
    check(mayfly, "up", "--memory", "256M", "bench")
    path = f"{home}/vms/bench/run/vsock.sock"
    print(f"{'ms':44} {'p50':>9} {'p95':>9} {'p99':>9}")
    row("mayfly exec -- true", timed(rounds, lambda: check(mayfly, "exec", "bench", "--", "true")))
    row("exec true, in one process", timed(rounds, lambda: execute(path, ["/bin/true"])))
    row("a request that starts nothing", timed(rounds, lambda: request(path, {"op": "jobs"})))

    counts(mayfly, path, rounds)
    # The same two; what is more than above is the endpoint's, as is all of it where there is no guest.
    mcp(mayfly, "bench", [("exec true, through mayfly mcp", rounds, "exec", {"argv": ["/bin/true"]}),
                          ("the request, through mayfly mcp", rounds, "jobs", {})])
    check(mayfly, "create", "bench-down")
    mcp(mayfly, "bench-down", [("a tool's call, the endpoint's own part", 1000, "status", {})])

    size = 32 * MIB
    throughput("stdout of a command", size,
               lambda: execute(path, ["/bin/dd", "if=/dev/zero", "bs=65536", f"count={size >> 16}"]))
    with open(f"{home}/file", "wb") as f:
        f.write(os.urandom(size))
    throughput("cp of a file into the machine", size,
               lambda: check(mayfly, "cp", "-q", f"{home}/file", "bench:/tmp/file"))
    throughput("cp of a file out of it", size,
               lambda: check(mayfly, "cp", "-q", "bench:/tmp/file", f"{home}/back"))
    check("cmp", f"{home}/file", f"{home}/back")


def counts(mayfly, path, execs):
    """What one exec makes the monitor do, on a machine where nothing else happens."""
    def stats():
        out = subprocess.run([mayfly, "stats", "--json", "bench"], check=True,
                             stdout=subprocess.PIPE).stdout
        all_of_it = json.loads(out)
        return {f"{part} {key}": n for part in ("exits", "vsock") for key, n in all_of_it[part].items()}

    execute(path, ["/bin/true"])
    before = stats()
    for _ in range(execs):
        execute(path, ["/bin/true"])
    each = ((key, (n - before[key]) / execs) for key, n in stats().items())
    print("for one exec: " + ", ".join(f"{key} {n:.1f}" for key, n in each if n >= 0.05))


def main():
    mayfly = os.path.abspath(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    home = tempfile.mkdtemp(prefix="mayfly-bench-")
    os.environ["MAYFLY_HOME"] = home
    try:
        load = os.getloadavg()[0]
        print(f"{rounds} rounds; load {load:.1f} on {os.cpu_count()} CPUs")
        if load > os.cpu_count():
            print("warning: the machine was busy, so the times say little")
        up(mayfly, home, rounds)
    finally:
        subprocess.run([mayfly, "rm", "--force", "bench"], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(home, ignore_errors=True)


main()
