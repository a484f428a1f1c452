# SPDX-License-Identifier: Apache-2.0
"""Other monitors, where they are installed: each answers its first exec, and goes.

Firecracker takes our kernel, image and agent as they are, and has the same convention of vsock.
BoxLite (npm) brings its own kernel and agent and an image of ours in OCI layout; what is compared is
only what its user waits for. cloud-hypervisor and crosvm have virtio over PCI alone, which our guest's
kernel does without: the same kernel under them is not to be had.
"""
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time

from machines import MEMORY_MIB, Machine

BOX_S = 300


class Firecracker(Machine):
    name = "Firecracker"
    threads = ("firecracker", "fc_")

    def __init__(self, build):
        self.folder = tempfile.mkdtemp(prefix="mayfly-bench-")
        config = {
            "boot-source": {"kernel_image_path": os.path.abspath(f"{build}/vmlinux"),
                            "initrd_path": os.path.abspath(f"{build}/initramfs.cpio"),
                            "boot_args": "quiet mitigations=off reboot=k panic=-1"},
            "machine-config": {"vcpu_count": 1, "mem_size_mib": MEMORY_MIB},
            "drives": [],
            "vsock": {"guest_cid": 3, "uds_path": f"{self.folder}/vsock"},
            "entropy": {},
        }
        with open(f"{self.folder}/config.json", "w", encoding="ascii") as f:
            json.dump(config, f)

    def start(self, poll=0.1):
        self.process = subprocess.Popen(
            ["firecracker", "--no-api", "--config-file", f"{self.folder}/config.json"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.pid = self.process.pid
        self.wait(poll)

    def stop(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)

    def connect(self, port):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"{self.folder}/vsock")
            sock.sendall(b"CONNECT %d\n" % port)
            while (byte := sock.recv(1)) != b"\n":
                if not byte:
                    raise ConnectionRefusedError("nobody listens yet")
        except OSError:
            sock.close()
            raise
        return sock


# --- BoxLite -------------------------------------------------------------------------------------

BOX = """
const { SimpleBox } = await import(process.argv[2]);
const box = new SimpleBox({ rootfsPath: process.argv[3], memoryMib: %d, cpus: 1 });
try {
  if ((await box.exec('/bin/true')).exitCode !== 0) throw new Error('true failed');
  const answered = Date.now();
  if ((await box.exec('/bin/true')).exitCode !== 0) throw new Error('true failed');
  console.log(JSON.stringify({ answered, again: Date.now() - answered }));
} finally { await box.stop(); }
""" % MEMORY_MIB


def boxlite():
    """The entry of the npm package, globally installed or beside the working directory; or None."""
    if not shutil.which("node"):
        return None
    found = subprocess.run(
        ["node", "-p", "require.resolve('@boxlite-ai/boxlite', {paths: [process.cwd(), ...process.argv.slice(1)]})",
         subprocess.run(["npm", "root", "-g"], capture_output=True, text=True, check=False).stdout.strip() or "/"],
        capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def oci_layout(folder):
    """An image of busybox alone, in OCI layout."""
    os.makedirs(f"{folder}/blobs/sha256")

    def blob(content):
        digest = hashlib.sha256(content).hexdigest()
        with open(f"{folder}/blobs/sha256/{digest}", "wb") as f:
            f.write(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    def described(kind, value):
        return {"mediaType": f"application/vnd.oci.image.{kind}.v1+json", **blob(json.dumps(value).encode())}

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("bin", "dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.add(shutil.which("busybox") or sys.exit("busybox is not installed"), "bin/busybox")
        for name in ("sh", "true"):
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        for name, text in (("passwd", b"root:x:0:0:root:/root:/bin/sh\n"), ("group", b"root:x:0:\n")):
            entry = tarfile.TarInfo(f"etc/{name}")
            entry.size, entry.mode = len(text), 0o644
            tar.addfile(entry, io.BytesIO(text))
    layer = blob(packed.getvalue())
    config = described("config", {
        "architecture": "amd64", "os": "linux", "config": {"Cmd": ["/bin/sh"], "Env": ["PATH=/bin:/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}})
    manifest = described("manifest", {
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config,
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", **layer}]})
    for name, value in (("index.json", {"schemaVersion": 2, "manifests": [manifest]}),
                        ("oci-layout", {"imageLayoutVersion": "1.0.0"})):
        with open(f"{folder}/{name}", "w", encoding="ascii") as f:
            json.dump(value, f)


class Boxlite:
    """Boxes one after the other, with what BoxLite keeps between them."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="mayfly-bench-")
        self.entry = boxlite()
        oci_layout(f"{self.folder}/image")
        with open(f"{self.folder}/box.mjs", "w", encoding="ascii") as f:
            f.write(BOX)

    def run(self):
        """Returns ms from process start to the first exec answered, of one more exec, and in all.
        RuntimeError says why not."""
        start = time.time()
        done = subprocess.run(["node", f"{self.folder}/box.mjs", self.entry, f"{self.folder}/image"],
                              env={**os.environ, "BOXLITE_HOME": f"{self.folder}/home"}, timeout=BOX_S,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        in_all = (time.time() - start) * 1000
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
        told = json.loads(done.stdout.strip().splitlines()[-1])
        return told["answered"] - start * 1000, told["again"], in_all

    def close(self):
        shutil.rmtree(self.folder)
