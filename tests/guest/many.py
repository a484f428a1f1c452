# SPDX-License-Identifier: Apache-2.0
"""Many commands on one machine: many.py MAYFLY NAME AT_ONCE IN_A_ROW KILLED

So many at once, so many in a row, and so many clients that are killed at a random moment; and what
remains of them: nothing. Prints "ok" and "FAIL" lines.
"""
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time

import json

AGENT_PORT = 1024
REQUEST, STDIN, STDIN_EOF, STDOUT, EXIT, ERROR = 1, 2, 3, 18, 21, 22
PATIENCE_S = 120  # for what must come; nothing is gated on time

mayfly, name = sys.argv[1:3]
at_once, in_a_row, killed = map(int, sys.argv[3:6])
folder = f"{os.environ['MAYFLY_HOME']}/vms/{name}"
failed = False


def check(what, condition, detail=""):
    global failed
    failed |= not condition
    print(f"ok {what}" if condition else f"FAIL {what}: {detail}", flush=True)


def frame(kind, payload=b""):
    return struct.pack("<IB3x", len(payload), kind) + payload


class Command:
    """One on a connection of its own; sent at once, its answer parsed as it comes."""

    def __init__(self, argv, stdin=None):
        body = json.dumps({"v": 1, "op": "exec", "argv": argv, "stdin": stdin is not None})
        data = f"CONNECT {AGENT_PORT}\n".encode() + frame(REQUEST, body.encode())
        if stdin is not None:
            data += frame(STDIN, stdin) + frame(STDIN_EOF)
        self.output, self.status, self.data = b"", None, b""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(f"{folder}/run/vsock.sock")
        self.sock.sendall(data)

    def receive(self):
        """What has come. True when that was the end."""
        piece = self.sock.recv(1 << 17)
        self.data += piece
        if self.data.startswith(b"OK "):
            end = self.data.find(b"\n") + 1
            if end:
                self.data = self.data[end:]
        while len(self.data) >= 8:
            length, kind = struct.unpack("<IB3x", self.data[:8])
            if len(self.data) < 8 + length:
                break
            payload, self.data = self.data[8:8 + length], self.data[8 + length:]
            if kind == STDOUT:
                self.output += payload
            elif kind == EXIT:
                self.status = struct.unpack("<II", payload[:8])
            elif kind == ERROR:
                self.status = payload[8:].decode(errors="replace")
        if piece and self.status is None:
            return False
        self.sock.close()
        return True


def finish(commands):
    """Waits for all of them; those that got no answer keep the status None."""
    deadline = time.monotonic() + PATIENCE_S + len(commands)
    with selectors.DefaultSelector() as selector:
        for c in commands:
            selector.register(c.sock, selectors.EVENT_READ, c)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(1):
                sock = key.fileobj
                if key.data.receive():
                    selector.unregister(sock)


def in_guest(script):
    c = Command(["/bin/sh", "-c", script])
    finish([c])
    return c.output.decode().strip()


def eventually(what, get, wanted):
    deadline = time.monotonic() + PATIENCE_S
    while (got := get()) != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    check(what, got == wanted, f"got {got!r}, wanted {wanted!r}")


monitor = open(f"{folder}/run/lock").read().split()[0]


def agent_files():
    return in_guest("ls /proc/1/fd | wc -l")


def monitor_files():
    return len(os.listdir(f"/proc/{monitor}/fd"))


def agent_kib():
    return int(in_guest("cat /proc/1/statm").split()[1]) * 4


def monitor_kib():
    """What is the monitor's own, without the guest's memory."""
    fields = dict(line.split(":", 1) for line in open(f"/proc/{monitor}/status"))
    return int(fields["VmData"].split()[0])


def row(count):
    bad = 0
    for i in range(count):
        c = Command(["/bin/busybox", "echo", str(i)])
        finish([c])
        bad += c.status != (0, 0) or c.output != b"%d\n" % i
    return bad


def main():
    row(5)
    files, host_files = agent_files(), monitor_files()

    # With each a number to be handed back, so that none is mistaken for another.
    all_of_them = [Command(["/bin/sh", "-c", f"cat; exit {i % 100}"], b"%d" % i * 100)
                   for i in range(at_once)]
    finish(all_of_them)
    bad = [(i, c.status, c.output[:20]) for i, c in enumerate(all_of_them)
           if c.status != (i % 100, 0) or c.output != b"%d" % i * 100]
    check(f"{at_once} at once", not bad, f"{len(bad)} wrong, the first {bad[:3]}")
    # The cgroups that they had are kept, two files each: so many and no more from now on.
    files = agent_files()
    # At most: what asked for the first number was still connected.
    closed = lambda: monitor_files() <= host_files
    eventually("the monitor has closed its files", closed, True)

    row(in_a_row // 10)
    kib, host_kib = agent_kib(), monitor_kib()
    check(f"{in_a_row} in a row", (bad := row(in_a_row)) == 0, f"{bad} wrong")
    grown, host_grown = agent_kib() - kib, monitor_kib() - host_kib
    # A page for each would be far more.
    check("the agent has not grown", grown < in_a_row // 4 + 64, f"by {grown} KiB")
    check("nor has the monitor", host_grown < in_a_row // 4 + 64, f"by {host_grown} KiB")
    eventually("no file of the agent is left open", agent_files, files)
    eventually("none of the monitor", closed, True)

    # Killed at any moment between its start and a while after its answer.
    start = time.monotonic()
    subprocess.run([mayfly, "exec", name, "--", "true"], check=True)
    span = 2 * (time.monotonic() - start)
    seed = int(time.time())
    random.seed(seed)
    print(f"# killing {killed} clients within {span:.3f} s each, seed {seed}", flush=True)
    tree = "sleep 7771 & setsid sh -c 'sleep 7772 & sleep 7773' & cat"
    for _ in range(killed):
        client = subprocess.Popen([mayfly, "exec", "-i", name, "--", "sh", "-c", tree],
                                  stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        time.sleep(random.uniform(0, span))
        client.kill()
        client.communicate()
    left = "for p in /proc/[0-9]*; do read -r c 2>/dev/null <$p/comm; " \
           "[ \"$c\" = sleep ] && echo x; done | wc -l"
    eventually("killed clients take their trees along", lambda: in_guest(left), "0")
    eventually("and their files in the agent", lambda: int(agent_files()) <= int(files) + 4, True)
    eventually("and in the monitor", closed, True)
    eventually("no zombie", lambda: in_guest("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '"),
               "0")
    print(f"# agent: {agent_files()} files, {agent_kib()} KiB; monitor: {monitor_files()} files, "
          f"{monitor_kib()} KiB of data", flush=True)


main()
sys.exit(failed)
