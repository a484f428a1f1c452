# SPDX-License-Identifier: Apache-2.0
"""The lab machine's kernel and initramfs: made once, cached by the hash of what they are made of.

Runs in the thread of whoever asks; a lock on the cache directory lets only one process build.
The kernel is Debian's generic one, unpacked from its package and never installed (the cloud flavour
has no 9p). QEMU enters its uncompressed ELF directly (PVH): decompressing it under TCG would take
nearly three seconds of every start.
"""

import fcntl
import glob
import hashlib
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time

HERE = os.path.dirname(os.path.realpath(__file__))

# In order of loading; what they depend on is found in the modules themselves.
MODULES = """
virtio_pci virtio_console 9pnet_virtio 9p overlay
crc32c_generic loop ext4
kvm-amd tun vhost_vsock
bridge veth nf_tables nft_ct nft_nat nft_masq nft_chain_nat nft_reject_inet
""".split()
HASH_DIGITS = 16
UNUSED_S = 14 * 86400


class LabError(Exception):
    """A failure of the lab itself: the text names the thing and the cure."""


def cache_dir():
    base = os.environ.get("MAYFLY_CACHE")
    if not base and os.geteuid() == 0:
        base = "/var/cache/mayfly"
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
                            "mayfly")
    path = os.path.join(os.path.abspath(base), "lab")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        raise LabError(f"cannot make the cache directory {path}: {e.strerror}; "
                       "set MAYFLY_CACHE to a writable directory") from e
    return path


def tool(name, package):
    path = shutil.which(name)
    if not path:
        raise LabError(f"{name} is not installed: run `apt-get install {package}` (or `make deps`)")
    return path


def call(argv, **kwargs):
    """Runs a build step; its output appears only if it fails."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", **kwargs)
    if done.returncode:
        raise LabError(f"`{' '.join(argv)}` failed ({done.returncode}):\n{done.stdout.strip()}")
    return done.stdout


def kernel_package(cache):
    """The newest kernel package in the cache, else the one that linux-image-amd64 depends on."""
    def kept():
        return sorted(glob.glob(os.path.join(cache, "linux-image-*.deb")), key=os.path.getmtime)

    if kept():
        return kept()[-1]
    depends = call([tool("apt-cache", "apt"), "depends", "linux-image-amd64"])
    found = re.search(r"Depends: (linux-image-6\S+-amd64)\b", depends)
    if not found:
        raise LabError("apt knows no linux-image-amd64 of Debian: run `apt-get update`, or put a "
                       f"linux-image-6.1.0-*-amd64 package of Debian into {cache}")
    print(f"lab: downloading {found[1]}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="tmp-") as scratch:
        call([tool("apt-get", "apt"), "download", found[1]], cwd=scratch)
        for name in os.listdir(scratch):
            os.rename(os.path.join(scratch, name), os.path.join(cache, name))
    if not kept():
        raise LabError(f"apt-get download {found[1]} left no package: run `apt-get update`")
    return kept()[-1]


def uncompressed(bzimage):
    """The ELF within a bzImage (Documentation/x86/boot.rst: payload_offset, payload_length)."""
    setup_sects = bzimage[0x1f1] or 4
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (setup_sects + 1) * 512 + offset
    payload = bzimage[start:start + length]
    if bzimage[0x202:0x206] != b"HdrS" and not payload.startswith(b"\xfd7zXZ"):
        raise LabError("the kernel is not an xz-compressed bzImage")
    return lzma.LZMADecompressor().decompress(payload)


def unpack(deb):
    """The kernel and {module name: bytes} of those we need, read straight from the package."""
    files = {}
    vmlinuz = None
    with subprocess.Popen([tool("dpkg-deb", "dpkg"), "--fsys-tarfile", deb],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as proc:
        try:
            with tarfile.open(fileobj=proc.stdout, mode="r|") as tar:
                for member in tar:
                    name = os.path.basename(member.name)
                    if name.startswith("vmlinuz-"):
                        vmlinuz = tar.extractfile(member).read()
                    elif name.endswith(".ko"):
                        files[name[:-3].replace("-", "_")] = tar.extractfile(member).read()
        except (tarfile.TarError, EOFError):
            vmlinuz = None
    if proc.returncode or not vmlinuz:
        raise LabError(f"{deb} is damaged or no kernel package: remove it and try again")
    ordered = {}

    def need(name):
        key = name.replace("-", "_")
        if key in ordered:
            return
        if key not in files:
            raise LabError(f"{deb} has no module {name}: remove it and try again")
        depends = re.search(rb"\0depends=([^\0]*)\0", files[key])
        for dep in filter(None, depends[1].decode().split(",") if depends else []):
            need(dep)
        ordered[key] = files[key]

    for name in MODULES:
        need(name)
    return vmlinuz, ordered


def cpio(entries):
    """A newc archive of (name, mode, bytes[, (major, minor)])."""
    out = bytearray()
    for ino, (name, mode, data, *dev) in enumerate(entries + [("TRAILER!!!", 0, b"")], 1):
        major, minor = dev[0] if dev else (0, 0)
        fields = (ino, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08x" % f for f in fields) + name.encode() + b"\0"
        out += bytes(-len(out) % 4) + data
        out += bytes(-len(out) % 4)
    return bytes(out)


def build(deb, out):
    cc = tool(os.environ.get("CC", "gcc").split()[0], "gcc libc6-dev")
    strip = tool("strip", "binutils")
    vmlinuz, modules = unpack(deb)
    vmlinux = os.path.join(out, "vmlinux")
    with open(vmlinux, "wb") as f:
        f.write(uncompressed(vmlinuz))
    call([strip, "--strip-all", vmlinux])

    init = os.path.join(out, "init")
    call([cc, "-std=gnu17", "-D_GNU_SOURCE", "-O2", "-static", "-s", "-Wall", "-Wextra",
          os.path.join(HERE, "init.c"), "-o", init])
    with open(init, "rb") as f:
        entries = [("dev", 0o40755, b""), ("dev/console", 0o20600, b"", (5, 1)),
                   ("init", 0o100755, f.read())]
    os.unlink(init)
    names = []
    scratch = os.path.join(out, "module")
    for name, data in modules.items():
        with open(scratch, "wb") as f:
            f.write(data)
        # Without their signatures: TCG would check an RSA signature for each.
        call([strip, "--strip-debug", scratch])
        with open(scratch, "rb") as f:
            entries.append((f"{name}.ko", 0o100644, f.read()))
        names.append(f"/{name}.ko\n")
    os.unlink(scratch)
    entries.append(("modules", 0o100644, "".join(names).encode()))
    with open(os.path.join(out, "initramfs"), "wb") as f:
        f.write(cpio(entries))


def prune(cache):
    """Removes what no checkout has used for a while."""
    for path in glob.glob(os.path.join(cache, "?" * HASH_DIGITS)):
        if time.time() - os.path.getmtime(path) > UNUSED_S:
            shutil.rmtree(path)


def image():
    """Returns the directory that holds vmlinux and initramfs, after making them if need be."""
    cache = cache_dir()
    lock = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in glob.glob(os.path.join(cache, "tmp-*")):
            shutil.rmtree(left)  # of a build that was killed: we hold the lock
        deb = kernel_package(cache)
        inputs = hashlib.sha256(os.path.basename(deb).encode())
        for source in ("init.c", "lab_image.py"):
            with open(os.path.join(HERE, source), "rb") as f:
                inputs.update(hashlib.sha256(f.read()).digest())
        path = os.path.join(cache, inputs.hexdigest()[:HASH_DIGITS])
        if not os.path.isdir(path):
            print(f"lab: making the lab's machine in {path}", file=sys.stderr, flush=True)
            tmp = tempfile.mkdtemp(dir=cache, prefix="tmp-")
            try:
                build(deb, tmp)
                os.chmod(tmp, 0o755)
                os.rename(tmp, path)
            except BaseException:
                shutil.rmtree(tmp, ignore_errors=True)
                raise
            prune(cache)
        os.utime(path)  # in use
        return path
    finally:
        os.close(lock)
