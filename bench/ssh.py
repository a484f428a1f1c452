#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""mayfly exec beside ssh: ssh.py BUILD [ROUNDS]

The same kernel and root file system twice on this host: under mayfly, and under QEMU's microvm with
dropbear as the SSH server behind QEMU's user network. One command each in turn, so that both see the
same host. Needs qemu-system-x86, dropbear-bin, openssh-client, cpio; for a host whose KVM QEMU cannot
use, run it in the lab: tests/lab/lab run --timeout 1200 -- bench/ssh.py build/release
"""
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

PORT = 2222
BOOT_S = 180

INITTAB = """\
::sysinit:/bin/mount -t proc proc /proc
::sysinit:/bin/mount -t devtmpfs dev /dev
::sysinit:/bin/mkdir -p /dev/pts
::sysinit:/bin/mount -t devpts devpts /dev/pts
::sysinit:/bin/ifconfig lo up
::sysinit:/bin/ifconfig eth0 10.0.2.15 up
::respawn:/bin/dropbear -F -E -r /etc/key -p 22
"""


def check(*argv, **more):
    return subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **more)


def make_image(build, work):
    """The default image with dropbear and an init that starts it."""
    root = f"{work}/root"
    for folder in ("bin", "etc", "root/.ssh"):
        os.makedirs(f"{root}/{folder}")
    os.symlink("busybox", f"{root}/bin/init")
    dropbear = shutil.which("dropbear", path=os.environ["PATH"] + ":/usr/sbin")
    if not dropbear:
        sys.exit("dropbear is missing (package dropbear-bin)")
    shutil.copy(dropbear, f"{root}/bin/dropbear")
    for library in re.findall(r"(/\S+)", check("ldd", dropbear).stdout.decode()):
        library = library.rstrip(":")
        os.makedirs(root + os.path.dirname(library), exist_ok=True)
        shutil.copy(library, root + library)
    check("dropbearkey", "-t", "ed25519", "-f", f"{root}/etc/key", stderr=subprocess.DEVNULL)
    check("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{work}/id")
    shutil.copy(f"{work}/id.pub", f"{root}/root/.ssh/authorized_keys")
    for folder in ("root", "root/.ssh"):
        os.chmod(f"{root}/{folder}", 0o700)
    for name, text in (("inittab", INITTAB), ("shells", "/bin/sh\n")):
        with open(f"{root}/etc/{name}", "w", encoding="ascii") as f:
            f.write(text)
    with open(f"{work}/image", "wb") as out:
        with open(f"{build}/initramfs.cpio", "rb") as base:
            shutil.copyfileobj(base, out)
        out.flush()
        subprocess.run("find . | cpio -o -H newc --quiet -R 0:0", shell=True, check=True, cwd=root,
                       stdout=out)


def start_qemu(build, work):
    return subprocess.Popen(
        ["qemu-system-x86_64", "-M", "microvm,accel=kvm,acpi=off,rtc=off", "-cpu", "host", "-m", "256",
         "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
         "-serial", f"file:{work}/console", "-kernel", f"{build}/vmlinux", "-initrd", f"{work}/image",
         "-append", "console=ttyS0 quiet rdinit=/bin/init panic=-1 reboot=k mitigations=off "
                    "no_timer_check tsc=reliable",
         "-device", "virtio-rng-device", "-device", "virtio-net-device,netdev=n",
         "-netdev", f"user,id=n,hostfwd=tcp:127.0.0.1:{PORT}-:22"], stdin=subprocess.DEVNULL)


def ssh(work, *command):
    return ["ssh", "-q", "-F", "none", "-p", str(PORT), "-i", f"{work}/id", "-o", "BatchMode=yes",
            "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
            "root@127.0.0.1", *command]


def wait_for_ssh(work, qemu):
    deadline = time.monotonic() + BOOT_S
    while subprocess.run(ssh(work, "true"), stdin=subprocess.DEVNULL, check=False).returncode:
        if time.monotonic() > deadline or qemu.poll() is not None:
            with open(f"{work}/console", errors="replace") as console:
                sys.exit("no answer over SSH; the console's end:\n" + console.read()[-2000:])
        time.sleep(0.5)


def timed(argv):
    start = time.monotonic()
    check(*argv)
    return (time.monotonic() - start) * 1000


def main():
    build = os.path.abspath(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    mayfly = f"{build}/mayfly"
    work = tempfile.mkdtemp(prefix="mayfly-bench-")
    os.environ["MAYFLY_HOME"] = f"{work}/home"
    qemu = None
    try:
        make_image(build, work)
        qemu = start_qemu(build, work)
        wait_for_ssh(work, qemu)
        check(mayfly, "create", "--memory", "256M", "bench")
        check(mayfly, "up", "bench")
        commands = {"ssh, QEMU microvm": ssh(work, "true"),
                    "mayfly exec": [mayfly, "exec", "bench", "--", "true"]}
        times = {name: [] for name in commands}
        for _ in range(rounds + 1):
            for name, argv in commands.items():
                times[name].append(timed(argv))
        print(f"{rounds} rounds in turn, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        print(f"{'ms for the command true':28} {'p50':>9} {'p95':>9} {'p99':>9}")
        p50 = {}
        for name, all_of_them in times.items():
            ms = sorted(all_of_them[1:])  # without the first
            p50[name] = statistics.median(ms)
            at = [ms[min(len(ms) - 1, int(len(ms) * q))] for q in (0.95, 0.99)]
            print(f"{name:28} {p50[name]:9.1f} {at[0]:9.1f} {at[1]:9.1f}")
        print(f"ratio of the medians: 1 to {p50['ssh, QEMU microvm'] / p50['mayfly exec']:.1f}")
    finally:
        subprocess.run([mayfly, "rm", "--force", "bench"], stderr=subprocess.DEVNULL, check=False)
        if qemu:
            qemu.kill()
            qemu.wait()
        shutil.rmtree(work, ignore_errors=True)


main()
