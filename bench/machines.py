# SPDX-License-Identifier: Apache-2.0
"""The same guest under mayfly and under QEMU's microvm, for comparisons. Runs on a host whose KVM
runs both: the lab, or hardware. Commands go to the same agent over vsock in either.
"""
import json
import os
import re
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time

AGENT_PORT = 1024
REQUEST, STDOUT, EXIT, ERROR = 1, 18, 21, 22
BOOT_S = 180
MEMORY_MIB = 256
TRACING = "/sys/kernel/tracing"
HISTOGRAM = "hist:keys=common_pid.execname:size=4096"


def prepare():
    """Of the host: what the counts come from."""
    for kind, where in (("debugfs", "/sys/kernel/debug"), ("tracefs", TRACING)):
        subprocess.run(["mount", "-t", kind, kind, where], check=False, stderr=subprocess.DEVNULL)


def run(*argv, **more):
    return subprocess.run(argv, stdin=subprocess.DEVNULL, check=True, capture_output=True,
                          text=True, **more).stdout


class Machine:
    """Subclasses have start(), stop(), pid and connect(port)."""

    def exec(self, *argv):
        """What the command writes to its standard output."""
        body = json.dumps({"v": 1, "op": "exec", "argv": argv}).encode()
        out = b""
        with self.connect(AGENT_PORT) as sock, sock.makefile("rb") as frames:
            sock.sendall(struct.pack("<IB3x", len(body), REQUEST) + body)
            while header := frames.read(8):
                length, kind = struct.unpack("<IB3x", header)
                payload = frames.read(length)
                if kind == STDOUT:
                    out += payload
                if kind == ERROR or (kind == EXIT and payload[:8] != bytes(8)):
                    sys.exit(f"{self.name}: {argv}: {payload} {out.decode()}")
                if kind == EXIT:
                    return out.decode()
        sys.exit(f"{self.name}: the agent is gone")

    def wait(self, poll=0.1):
        deadline = time.monotonic() + BOOT_S
        while time.monotonic() < deadline:
            try:
                self.exec("/bin/true")
                return
            except OSError:
                time.sleep(poll)
        sys.exit(f"{self.name} does not answer")

    def cost(self, work):
        """What work costs: exits of the CPUs as KVM counts them (of all machines, and there is no
        other), system calls of the monitor by the kernel's own tracing. Returns work's result too.
        """
        trigger = f"{TRACING}/events/raw_syscalls/sys_enter/trigger"
        with open(trigger, "w") as f:
            f.write(HISTOGRAM)
        before = self.exits()
        result = work()
        exits = self.exits() - before
        with open(os.path.dirname(trigger) + "/hist") as f:
            calls = sum(int(count) for name, count in re.findall(
                r"common_pid: (\S+) .*hitcount: +(\d+)", f.read()) if name.startswith(self.threads))
        with open(trigger, "w") as f:
            f.write("!" + HISTOGRAM)
        return result, exits, calls

    @staticmethod
    def exits():
        with open("/sys/kernel/debug/kvm/exits") as f:
            return int(f.read())


class Mayfly(Machine):
    name = "mayfly"
    threads = ("mayfly-vmm", "vcpu")

    def __init__(self, build, disks=(), tap=None):
        self.mayfly = f"{build}/mayfly"
        self.options = []
        for path, writable in disks:
            self.options += ["--disk", f"{path},mode={'raw' if writable else 'ro'}"]
        if tap:
            self.options += ["--net", f"tap:{tap},address=10.78.0.2/24"]
        self.dir = f"{os.environ['MAYFLY_HOME']}/vms/bench"

    def start(self):
        run(self.mayfly, "up", "--memory", f"{MEMORY_MIB}M", *self.options, "bench")
        self.pid = int(open(f"{self.dir}/run/lock").read())
        self.wait()

    def stop(self):
        run(self.mayfly, "rm", "--force", "bench")

    def connect(self, port):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{self.dir}/run/vsock.sock")
        sock.sendall(b"CONNECT %d\n" % port)
        while sock.recv(1) != b"\n":
            pass
        return sock

    def stream(self, port):
        """The address of a port for tests/guest/stream."""
        return f"unix:{self.dir}/run/vsock.sock:{port}"


class Qemu(Machine):
    name = "QEMU"
    threads = ("qemu-system-x86", "CPU")
    CID = 78

    def __init__(self, build, disks=(), tap=None):
        self.argv = [
            "qemu-system-x86_64", "-M", "microvm,acpi=off,rtc=off,pcie=off", "-accel", "kvm",
            "-cpu", "host", "-m", str(MEMORY_MIB), "-smp", "1", "-nodefaults", "-no-user-config",
            "-display", "none", "-no-reboot", "-kernel", f"{build}/vmlinux", "-initrd",
            f"{build}/initramfs.cpio",
            "-device", f"vhost-vsock-device,guest-cid={self.CID}", "-device", "virtio-rng-device"]
        append = "quiet mitigations=off"
        for i, (path, writable) in enumerate(disks):
            self.argv += ["-drive", f"id=d{i},if=none,format=raw,aio=io_uring,file={path}" +
                          ("" if writable else ",readonly=on"),
                          "-device", f"virtio-blk-device,drive=d{i}"]
        if tap:
            self.argv += ["-netdev", f"tap,id=n,ifname={tap},script=no,downscript=no",
                          "-device", "virtio-net-device,netdev=n"]
            append += " mayfly_net=10.78.0.2/24,,"
        # microvm announces its devices last first, so that the disks' order is ours.
        self.argv += ["-append", append]

    def start(self, poll=0.1):
        self.process = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL)
        self.pid = self.process.pid
        self.wait(poll)

    def stop(self):
        self.process.kill()
        self.process.wait()

    def connect(self, port):
        sock = socket.socket(socket.AF_VSOCK)
        sock.connect((self.CID, port))
        return sock

    def stream(self, port):
        return f"vsock:{self.CID}:{port}"


def tools_image(path, work, *programs):
    """An erofs of programs with their libraries, for a guest that has none. Returns how to call
    one in the guest, where it is mounted."""
    os.makedirs(f"{work}/tools/lib", exist_ok=True)
    for program in programs:
        where = shutil.which(program)
        if not where:
            sys.exit(f"{program} is not installed")
        shutil.copy(where, f"{work}/tools/")
        for lib in re.findall(r"/\S+", run("ldd", where)):
            shutil.copy(lib, f"{work}/tools/lib/")
    run("mkfs.erofs", path, f"{work}/tools")


def call(program):
    return f"cd /mnt && lib/ld-linux-x86-64.so.2 --library-path lib ./{program}"


def mount_tools(machine):
    """The tools' disk is the one that is erofs: the order of disks is the monitor's affair."""
    for disk in ("vda", "vdb"):
        kind = machine.exec("/bin/sh", "-c", f"mount -t erofs -o ro /dev/{disk} /mnt 2>/dev/null "
                            "&& echo tools || echo data").strip()
        if kind == "data":
            data = f"/dev/{disk}"
    return data


def show(title, rows, better):
    """rows: name -> (values of mayfly, of QEMU)."""
    print(f"\n{title:40} {'mayfly':>10} {'QEMU':>10} {'ratio':>7}")
    for name, (ours, theirs) in rows.items():
        if not ours or not theirs:  # no rounds: what is counted alone
            continue
        a, b = statistics.median(ours), statistics.median(theirs)
        ratio = (a / b if better == "more" else b / a) if a and b else float("nan")
        print(f"{name:40} {a:10.2f} {b:10.2f} {ratio:7.2f}")
