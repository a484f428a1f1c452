#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a built guest kernel costs: sizes, initcalls, and where its boot goes.

Called by build.sh --report with the directory of a build. The boot is traced
with initcall_debug: in a machine of the monitor named by MAYFLY (then in
microseconds of this host), or else in an emulated one whose clock counts
instructions (then the same on every host), followed by the functions that
execute most of them.
"""
import bisect
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile

TRACE = "initcall_debug log_buf_len=1M"
CALIBRATION = """calibrate_delay delay_loop delay_tsc quick_pit_calibrate setup_boot_APIC_clock
    timekeeping_init mc146818_avoid_UIP mc146818_get_time_callback rtc_cmos_read __const_udelay""".split()
LINE = re.compile(r"\[ *(\d+)\.(\d{6})\] (.*)")


def die(message):
    sys.exit(f"kernel report: {message}")


def sizes(vmlinux):
    out = subprocess.run(["readelf", "-SW", vmlinux], check=True, capture_output=True, text=True)
    rows = re.findall(r"^ *\[ *\d+\] (\S+) +(PROGBITS|NOBITS|NOTE) +\S+ \S+ (\S+) \S+ +[WXMSILA]*A",
                      out.stdout, re.M)
    print(f"{'section':24}{'bytes':>10}")
    small = total = 0
    for name, _, hexsize in rows:
        size = int(hexsize, 16)
        total += size
        if size >= 8192:
            print(f"{name:24}{size:10}")
        else:
            small += size
    print(f"{'(others)':24}{small:10}\n{'in memory':24}{total:10}")
    print(f"{'file':24}{os.path.getsize(vmlinux):10}")


def symbols(system_map):
    """Addresses and names; of those at one address the first stays first."""
    with open(system_map, encoding="ascii") as f:
        return [(int(addr, 16), name) for addr, _, name in map(str.split, f)]


def count_initcalls(syms):
    at = {name: addr for addr, name in syms}
    return (at["__initcall_end"] - at["__initcall_start"]) // 4  # 32-bit relative addresses


def cpio(members):
    """An uncompressed initramfs (newc) of (name, mode, bytes)."""
    blob = b""
    for ino, (name, mode, data) in enumerate(members + [("TRAILER!!!", 0, b"")]):
        fields = (ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        blob += b"070701" + b"".join(b"%08X" % f for f in fields) + name.encode() + b"\0"
        blob += b"\0" * (-len(blob) % 4) + data
        blob += b"\0" * (-len(blob) % 4)
    return blob


def boot_emulated(vmlinux, words, qemu_options):
    """Boots to a shell script that prints the log; returns what came on the console."""
    busybox = shutil.which("busybox")
    if not shutil.which("qemu-system-x86_64") or not busybox:
        die("name a monitor in MAYFLY, or: apt-get install qemu-system-x86 busybox-static")
    with open(busybox, "rb") as f, tempfile.NamedTemporaryFile() as initrd:
        initrd.write(cpio([
            ("bin", 0o040755, b""),
            ("bin/busybox", 0o100755, f.read()),
            ("init", 0o100755, b"#!/bin/busybox sh\nbusybox dmesg\nbusybox reboot -f\n"),
        ]))
        initrd.flush()
        run = subprocess.run(
            ["qemu-system-x86_64", "-M", "microvm,x-option-roms=off,rtc=on,acpi=off,isa-serial=on",
             "-accel", "tcg", "-cpu", "qemu64,-svm,+rdrand", "-m", "128", "-nodefaults",
             "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
             "-kernel", vmlinux, "-initrd", initrd.name, *qemu_options, "-append",
             "quiet console=ttyS0 reboot=k panic=-1 tsc=reliable no_timer_check lpj=1000000 " + words],
            check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        if run.returncode:
            die(f"qemu failed ({run.returncode}): {run.stderr.strip()}")
        return run.stdout


def count_functions(vmlinux, syms):
    """Instructions from the kernel's entry to init by function, as emulated ring 0 would run them.

    Calibrating clocks is left out: it waits for time to pass, and mayfly's machines skip it.
    """
    text = sorted(syms)
    addrs = [addr for addr, _ in text]
    with tempfile.TemporaryDirectory() as work:
        plugin, out = os.path.join(work, "count.so"), os.path.join(work, "counts")
        here = os.path.dirname(os.path.abspath(__file__))
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", plugin,
                        os.path.join(here, "count.c")], check=True)
        boot_emulated(vmlinux, "emulated_ring0", ["-plugin", f"{plugin},out={out}"])
        by_name = collections.Counter()
        with open(out, encoding="ascii") as f:
            for line in f:
                addr, insns, runs = line.split()
                at = bisect.bisect_right(addrs, int(addr, 16)) - 1
                if at >= 0 and int(addr, 16) >= 1 << 63:
                    by_name[text[at][1]] += int(insns) * int(runs)
    for name in CALIBRATION:
        by_name.pop(name, None)
    total = sum(by_name.values())
    print(f"{'kernel entry to init':36}{total:10} instructions")
    for name, count in by_name.most_common():
        if count * 100 < total:
            break
        print(f"  {name:34}{count:10}  {100 * count / total:5.1f} %")


def boot_machine(monitor, vmlinux):
    run = subprocess.run([monitor, "run", "--kernel", vmlinux, "--append", TRACE, "--", "dmesg"],
                         check=False, capture_output=True, text=True, timeout=300)
    if run.returncode:
        die(f"{monitor} run failed ({run.returncode}): {run.stderr.strip()}")
    return run.stdout


def report_boot(log, names, unit, whole_boot):
    """Initcalls over 1 % of the boot, without the time that the tracing itself takes.

    An emulated machine calibrates clocks by waiting, before the initcalls; there the share is
    that of all initcalls.
    """
    calls, tracing, returned, boot = [], 0, None, None
    for line in log.splitlines():
        m = LINE.match(line.strip())
        if not m:
            continue
        at, text = int(m[1]) * 1_000_000 + int(m[2]), m[3]
        if text.startswith("calling ") and returned is not None:
            tracing += at - returned  # nothing but printing lies between the two
        returned = None
        m = re.match(r"initcall (?:0x)?([0-9a-f]+) returned -?\d+ after (\d+) usecs", text)
        if m:
            calls.append((int(m[2]), names.get(int(m[1], 16), m[1])))
            returned = at
        if text.startswith("Run ") and text.endswith(" as init process"):
            boot = at
    if not calls or boot is None:
        die("the boot left no trace; the end of its log:\n" + "\n".join(log.splitlines()[-15:]))
    total = in_calls = sum(t for t, _ in calls)
    if whole_boot:
        total = boot - tracing
        print(f"{'first message to init':36}{total:10} {unit}")
    print(f"{f'{len(calls)} initcalls':36}{in_calls:10} {unit}  {100 * in_calls / total:5.1f} %")
    for t, name in sorted(calls, reverse=True):
        if t * 100 >= total:
            print(f"  {name:34}{t:10} {unit}  {100 * t / total:5.1f} %")


def main():
    build = sys.argv[1]
    vmlinux = os.path.join(build, "vmlinux")
    syms = symbols(os.path.join(build, "System.map"))
    sizes(vmlinux)
    print(f"\n{'initcalls':24}{count_initcalls(syms):10}\n", flush=True)
    names = dict(syms)
    monitor = os.environ.get("MAYFLY")
    if monitor:
        report_boot(boot_machine(monitor, vmlinux), names, "us", True)
    else:
        log = boot_emulated(vmlinux, TRACE, ["-icount", "shift=0"])
        report_boot(log, names, "k instructions", False)
        print()
        count_functions(vmlinux, syms)


main()
