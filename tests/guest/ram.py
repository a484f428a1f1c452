# SPDX-License-Identifier: Apache-2.0
"""Guest RAM as a snapshot has it, read by what docs/snapshot-format.md says, and by nothing of ours.

  ram.py hash DIR            SHA-256 of RAM, through all that the snapshot in DIR builds upon
  ram.py same RUN DIR -- CMD brings the machine of the run folder RUN to rest, runs CMD, which is to
                             take a snapshot and print its id, writes a whole one of the same
                             instant to the new folder DIR, lets the machine go on, and prints
                             "same", or what differs
  ram.py live RUN DIR1 DIR2  takes one live to the new folder DIR1, which leaves the machine at rest, a
                             whole one of the same instant to DIR2, lets it go on, and prints the
                             same, and how many rounds it took
  ram.py faults RUN WHICH    how many page faults of this kind there were ("lazy", "prefetched")
"""
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys

PAGE = 4096


def open_one(folder):
    """(parent's id or "", size of RAM, a bit a page that is held, the memory file)"""
    with open(f"{folder}/state", "rb") as f:
        state = f.read()
    magic, fmt, nr = struct.unpack_from("<8sII", state)
    assert magic == b"mayflySS" and fmt == 1, folder
    ident, parent = state[16:32], state[32:48]
    for i in range(nr):
        name, off, length, _ = struct.unpack_from("<24sQQQ", state, 64 + 48 * i)
        if name.rstrip(b"\0") == b"memory":
            index = state[off:off + length]
    size, flags, chunk = struct.unpack_from("<QII", index)
    assert flags == (0 if any(parent) else 1), "compressed, or torn"
    chunks = (size // PAGE + chunk - 1) // chunk
    memory = open(f"{folder}/memory", "rb")
    memory.seek(size)
    assert memory.read(24) == b"mayflyMM" + ident, folder
    return parent.hex() if any(parent) else "", size, index[16 + 8 * chunks:], memory


def ram_of(folder):
    layers = [open_one(folder)]
    while layers[-1][0]:
        folder = f"{os.path.dirname(folder)}/{layers[-1][0]}"
        layers.append(open_one(folder))
    _, size, _, base = layers.pop()
    base.seek(0)
    ram = bytearray(base.read(size))  # pages that are not held are holes
    for _, _, held, memory in reversed(layers):
        for i, bits in enumerate(held):
            for page in range(8 * i, 8 * i + 8) if bits else ():
                if bits >> page % 8 & 1:
                    memory.seek(page * PAGE)
                    ram[page * PAGE:(page + 1) * PAGE] = memory.read(PAGE)
    return ram


def call(sock, method, params=None, fds=()):
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
    socket.send_fds(sock, [json.dumps(request).encode() + b"\n"], list(fds))
    reply = b""
    while not reply.endswith(b"\n"):
        part = sock.recv(65536)
        assert part, "the monitor has ended"
        reply += part
    reply = json.loads(reply)
    assert "result" in reply, reply
    return reply["result"]


def connect(run):
    sock = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(run)  # a socket's address holds few bytes
    sock.connect("control.sock")
    os.chdir(here)
    return sock


def snapshot(sock, folder, **params):
    os.mkdir(folder)
    fds = [os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
           for name in ("state", "memory")]
    told = call(sock, "snapshot", {"id": os.urandom(16).hex(), "unsynced": True, **params}, fds)
    for fd in fds:
        os.close(fd)
    call(sock, "abort")
    return told


def compare(chain, whole):
    differ = [p for p in range(0, len(whole), PAGE) if chain[p:p + PAGE] != whole[p:p + PAGE]] \
        if chain != whole else []
    return "same" if chain == whole else f"{len(differ)} pages differ, the first at {differ[:5]}"


def same(run, folder, command):
    with connect(run) as sock:
        call(sock, "pause")
        ident = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode().strip()
        snapshot(sock, folder)
        call(sock, "resume")
    print(compare(ram_of(f"{os.environ['MAYFLY_HOME']}/snapshots/{ident}"), ram_of(folder)))


def live(run, folder, whole):
    with connect(run) as sock:
        told = snapshot(sock, folder, live=True, hold=True, track=True, downtime_ns=10 ** 6)["live"]
        snapshot(sock, whole)
        call(sock, "resume")
    whole = ram_of(whole)
    with open(f"{folder}/memory", "rb") as f:  # it has no index yet
        print(compare(f.read(len(whole)), whole), len(told["rounds"]),
              sum(r["bytes"] for r in told["rounds"][1:]) + told["last_bytes"])


if sys.argv[1] == "hash":
    print(hashlib.sha256(ram_of(sys.argv[2])).hexdigest())
elif sys.argv[1] == "faults":
    with connect(sys.argv[2]) as control:
        print(call(control, "status")["faults"][sys.argv[3]])
elif sys.argv[1] == "live":
    live(*sys.argv[2:])
else:
    same(sys.argv[2], sys.argv[3], sys.argv[5:])
