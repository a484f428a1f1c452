# SPDX-License-Identifier: Apache-2.0
"""A container registry on a loopback port, which it prints: registry.py LAYOUT. One image, NAME:1,
whose blobs are those of an OCI layout; it knows as much of the protocol as a pull needs.
"""
import hashlib
import http.server
import json
import os
import sys

BLOBS = f"{sys.argv[1]}/blobs/sha256/"
KIND = "application/vnd.oci.image."


def described(digest, kind):
    return {"mediaType": KIND + kind, "digest": digest, "size": os.path.getsize(BLOBS + digest.removeprefix("sha256:"))}


def manifest():
    with open(f"{sys.argv[1]}/index.json", encoding="ascii") as f:
        digest = json.load(f)["manifests"][0]["digest"]
    with open(BLOBS + digest.removeprefix("sha256:"), encoding="ascii") as f:
        short = json.load(f)
    kinds = ("layer.v1.tar+gzip", "layer.v1.tar")
    return json.dumps({
        "schemaVersion": 2, "mediaType": KIND + "manifest.v1+json",
        "config": described(short["config"]["digest"], "config.v1+json"),
        "layers": [described(layer["digest"], kind) for layer, kind in zip(short["layers"], kinds)]}).encode()


class Registry(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        kind = "application/octet-stream"
        what = self.path.split("/")
        if self.path == "/v2/":
            content = b"{}"
        elif what[-2] == "manifests" and what[-1] in ("1", "sha256:" + hashlib.sha256(manifest()).hexdigest()):
            content, kind = manifest(), KIND + "manifest.v1+json"
        elif what[-2] == "blobs" and os.path.exists(BLOBS + os.path.basename(what[-1].removeprefix("sha256:"))):
            with open(BLOBS + os.path.basename(what[-1].removeprefix("sha256:")), "rb") as f:
                content = f.read()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
print(server.server_address[1], flush=True)
server.serve_forever()
