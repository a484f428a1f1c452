#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a guest sees of a disk, as a raw image: merge_overlay.py OVERLAY BASE OUT

For an overlay without frozen layers. Written from docs/disk-format.md alone, so that it checks that
too; it refuses what does not follow it.
"""
import os
import struct
import sys

BLOCK = 4096


def main():
    overlay, base, out = sys.argv[1:]
    with open(overlay, "rb") as f:
        header = f.read(512)
        magic, version, flags, size = struct.unpack_from("<8sIIQ", header)
        parent, base_bytes = struct.unpack_from("<16sQ", header, 40)
        map_bytes = (size // BLOCK // 4 + 1 + BLOCK - 1) // BLOCK * BLOCK
        if (magic, version, flags, parent) != (b"mayflyOV", 1, 0, bytes(16)):
            sys.exit(f"{overlay}: header {header[:64]}")
        if os.stat(overlay).st_size != BLOCK + map_bytes + size:
            sys.exit(f"{overlay}: length {os.stat(overlay).st_size}")
        if base_bytes != os.stat(base).st_size:
            sys.exit(f"{overlay}: made on a base of {base_bytes} bytes")
        f.seek(BLOCK)
        states = f.read(map_bytes)
        with open(base, "rb") as below, open(out, "wb") as merged:
            merged.truncate(size)
            for block in range(size // BLOCK):
                state = states[block // 4] >> 2 * (block % 4) & 3
                if state == 3:
                    sys.exit(f"{overlay}: block {block} has state 3")
                source = {0: below, 1: f}.get(state)
                if source is None:
                    continue
                source.seek(block * BLOCK + (BLOCK + map_bytes if state == 1 else 0))
                merged.seek(block * BLOCK)
                merged.write(source.read(BLOCK))
            merged.truncate(size)


main()
