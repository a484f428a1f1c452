#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A client of `mayfly mcp`: does a task in a machine as an agent would. mcp_task.py MAYFLY MACHINE

Prints "ok" and "FAIL" lines for tests/guest/mcp.sh, which calls it."""

import http.client
import json
import os
import pty
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request

MODERN = {"io.modelcontextprotocol/protocolVersion": "2026-07-28",
          "io.modelcontextprotocol/clientCapabilities": {}}
HOST = os.path.abspath("host")
failed = False


def equal(name, got, wanted):
    global failed
    if got == wanted:
        print("ok", name, flush=True)
    else:
        failed = True
        print(f"FAIL {name}: got {got!r}, wanted {wanted!r}", flush=True)


class Client:
    """One session. Answers may come in any order, so a thread sorts them by id."""

    def __init__(self, *args, modern=False):
        self.process = subprocess.Popen(list(args), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.meta = MODERN if modern else {}
        self.next_id = 0
        self.answers, self.notices = {}, []
        self.changed = threading.Condition()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            message = json.loads(line)
            with self.changed:
                if "id" in message:
                    self.answers[message["id"]] = message
                else:
                    self.notices.append(message)
                self.changed.notify_all()
        with self.changed:
            self.answers = None
            self.changed.notify_all()

    def write(self, message):
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def send(self, method, **params):
        self.next_id += 1
        meta = {**self.meta, **params.pop("_meta", {})}
        if meta:
            params["_meta"] = meta
        self.write({"id": self.next_id, "method": method, "params": params})
        return self.next_id

    def wait(self, number):
        with self.changed:
            self.changed.wait_for(lambda: self.answers is None or number in self.answers, 600)
            return self.answers.pop(number)

    def ask(self, method, **params):
        return self.wait(self.send(method, **params))

    def start(self, tool, **arguments):
        return self.send("tools/call", name=tool, arguments=arguments)

    def tool(self, name, **arguments):
        answer = self.wait(self.start(name, **arguments))
        result = answer.get("result")
        if not result or result["isError"]:
            return answer
        return result["structuredContent"]

    def names(self):
        return [tool["name"] for tool in self.ask("tools/list")["result"]["tools"]]

    def leave(self):
        self.process.stdin.close()
        return self.process.wait(600)


def words(answer):
    if "error" in answer:
        return answer["error"]["message"]
    return answer["result"]["content"][0]["text"]


def allow_folders(mayfly, machine):
    os.makedirs(f"{HOST}/in/tree")
    os.makedirs(f"{HOST}/out")
    with open(f"{HOST}/in/tree/file", "w") as f:
        f.write("of the host\n")
    ini = os.environ["MAYFLY_HOME"] + f"/vms/{machine}/vm.ini"
    with open(ini) as f:
        text = f.read()
    with open(ini + ".new", "w") as f:
        f.write(text.replace("[mcp]\n", f"[mcp]\nfolders = {HOST}/in, {HOST}/out:rw\n"))
    os.rename(ini + ".new", ini)


def task(c, mayfly, machine):
    """Set up, edit, build, test, keep, break, go back."""
    c.tool("write_file", path="/work/src/greet.in", content="say hello\n")
    c.tool("write_file", path="/work/build", mode="0755",
           content="#!/bin/sh\nset -e\ncd /work\nmkdir -p out\nsed 's/^say /echo /' src/greet.in >out/greet\n")
    c.tool("write_file", path="/work/test", mode="0755",
           content="#!/bin/sh\n[ \"$(sh /work/out/greet)\" = world ] && echo all tests pass\n")
    equal("exec: build", c.tool("exec", argv=["/work/build"])["exit_code"], 0)
    equal("exec: a test that fails is data", c.tool("exec", argv=["/work/test"])["exit_code"], 1)
    found = c.tool("search_files", path="/work/src", pattern="hel+o")["matches"]
    equal("search_files", [(m["path"], m["line"]) for m in found], [("/work/src/greet.in", 1)])
    equal("edit_file", c.tool("edit_file", path="/work/src/greet.in", old_text="hello",
                              new_text="world"), {"replacements": 1})
    run = c.tool("exec", argv=["sh", "-c", "./build && ./test"], cwd="/work",
                 env={"PASSWORD": "hunter2"})
    equal("exec: the test passes", (run["exit_code"], run["stdout"]), (0, "all tests pass\n"))
    equal("snapshot", c.tool("snapshot", tag="good")["tag"], "good")
    allow_folders(mayfly, machine)
    c.tool("remove", path="/work", recursive=True)
    equal("what is gone", "No such file" in words(c.tool("read_file", path="/work/test")), True)
    equal("restore", c.tool("restore", tag="good"), {"restored": "box@good"})
    equal("what is back", c.tool("read_file", path="/work/src/greet.in")["content"], "say world\n")
    listed = c.tool("list_dir", path="/work")["entries"]
    equal("list_dir", [e["name"] for e in listed], ["build", "out", "src", "test"])
    equal("snapshots", [s["tag"] for s in c.tool("snapshots")["snapshots"]], ["good"])
    # The folders are the owner's word of today: the restore has not taken them away.
    equal("upload", c.tool("upload", **{"from": f"{HOST}/in/tree", "to": "/work/up"}), {"state": "copied"})
    equal("what was copied", c.tool("read_file", path="/work/up/file")["content"], "of the host\n")
    equal("download", c.tool("download", **{"from": "/work/src", "to": f"{HOST}/out/src"}),
          {"state": "copied"})
    with open(f"{HOST}/out/src/greet.in") as f:
        equal("what has come", f.read(), "say world\n")
    equal("download to where the owner has not allowed it",
          "no folder" in words(c.tool("download", **{"from": "/work/src", "to": f"{HOST}/in/src"})), True)


def services(c):
    """No service manager here; and one that looks like systemd."""
    equal("services: none", c.tool("services"), {"manager": "none", "services": [], "truncated": False})
    said = c.tool("service", service="ssh", action="start")
    equal("service: says what to do", (said["exit_code"], "exec_background" in said["stderr"]), (127, True))
    c.tool("mkdir", path="/run/systemd/system")
    c.tool("write_file", path="/bin/systemctl", mode="0755", content="""#!/bin/sh
[ "$1" = list-units ] || exec echo "$@"
echo 'ssh.service  loaded    active   running OpenBSD Secure Shell server'
echo 'gone.service not-found inactive dead    gone.service'
echo 'x.service    loaded    failed   failed  X'
""")
    equal("services: systemd's", c.tool("services"), {"manager": "systemd", "truncated": False, "services": [
        {"name": "ssh", "running": True, "state": "active (running)",
         "description": "OpenBSD Secure Shell server"},
        {"name": "x", "running": False, "state": "failed (failed)", "description": "X"}]})
    equal("service: through systemd", c.tool("service", service="ssh", action="restart")["stdout"],
          "--no-pager restart -- ssh\n")
    c.tool("remove", path="/bin/systemctl")


def at_once(c):
    """Jobs, calls at the same time, cancelling."""
    c.tool("exec_background", job="server", argv=["sh", "-c", "echo up; sleep 7761"])
    out = c.tool("job_output", job="server", offset=0, wait_seconds=300)
    equal("job_output waits", (out["output"], out["running"]), ("up\n", True))
    slow = c.start("exec", argv=["sh", "-c", "sleep 7762 & echo $$ $! >/tmp/new; mv /tmp/new /tmp/pids; wait"])
    while c.tool("exec", argv=["test", "-e", "/tmp/pids"])["exit_code"] != 0:
        pass
    equal("a call beside one that runs", slow in c.answers, False)
    c.write({"method": "notifications/cancelled", "params": {"requestId": slow}})
    while c.tool("exec", argv=["sh", "-c", "for p in $(cat /tmp/pids); do [ ! -e /proc/$p ] || exit 1; done"])["exit_code"]:
        pass
    processes = [p["args"] for p in c.tool("processes")["processes"]]
    equal("processes", processes[0], "/init")
    equal("cancelled: all that it started is gone, and nothing else",
          (any("7762" in p for p in processes), any("7761" in p for p in processes)), (False, True))
    equal("cancelled: no answer", slow in c.answers, False)
    equal("job_kill", c.tool("job_kill", job="server"), {"was_running": True})
    equal("job_status", c.tool("job_status", job="server", wait_seconds=300)["signal"], 9)
    long = c.tool("exec", argv=["seq", "20000"], max_output_bytes=10)
    rest = c.tool("job_output", job=long["output"], offset=108889)
    equal("output beyond the result", (long["stdout"], rest["output"]),
          ("1\n2\n3\n4\n5\n", "20000\n"[1:]))


def terminal(c):
    """A terminal, and the same things as resources."""
    pty = c.tool("pty_open", argv=["sh"])["pty"]
    said = c.tool("pty_write", pty=pty, data="echo a$((1 + 1))b", enter=True, until="a2b",
                  timeout_seconds=600)
    equal("pty_write", (said["found"], said["running"]), (True, True))
    equal("pty_close", c.tool("pty_close", pty=pty), {"closed": True})
    read = c.ask("resources/read", uri="mayfly://files/work/src/greet.in")["result"]["contents"][0]
    equal("resources/read", read["text"], "say world\n")
    uris = [r["uri"] for r in c.ask("resources/list")["result"]["resources"]]
    equal("resources/list", {"mayfly://console", "mayfly://jobs/server/stdout"} <= set(uris), True)


def asking(c, mayfly, machine):
    """A port on the host is the owner's to give."""
    def requests():
        return json.loads(subprocess.check_output([mayfly, "approvals", "--json", machine]))

    c.tool("exec", argv=["busybox", "httpd", "-p", "127.0.0.1:8080", "-h", "/work"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    asked = c.start("publish_port", port=8080, host_port=port, wait_seconds=600)
    while not requests():
        pass
    wanted = requests()[0]
    equal("approvals", (wanted["action"], wanted["arguments"], wanted["state"]),
          ("publish_port", {"port": 8080, "host_port": port}, "pending"))
    owner = subprocess.Popen([mayfly, "approvals", machine, "allow", wanted["id"]],
                             stderr=subprocess.DEVNULL)
    told = c.wait(asked)["result"]["structuredContent"]
    equal("publish_port", (told["state"], told["address"]), ("allowed", f"127.0.0.1:{port}"))
    page = None
    while page is None and owner.poll() is None:
        try:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/src/greet.in", timeout=600).read()
        except urllib.error.URLError:  # it is about to listen
            pass
    equal("the port", page, b"say world\n")
    owner.send_signal(signal.SIGINT)
    equal("the owner ends it", owner.wait(600), 0)
    equal("what was allowed is used up", requests(), [])
    # So is the network, but for less of it.
    equal("set_network: more", c.tool("set_network", reach=["a.example"])["state"], "pending")
    ours, theirs = pty.openpty()
    owner = subprocess.Popen([mayfly, "approvals", machine, "watch"], stdin=theirs, stdout=theirs)
    shown = b""
    while not shown.endswith(b"[y/N] "):
        shown += os.read(ours, 4096)
    equal("approvals watch: what is asked for", b'set_network {"reach":["a.example"]}' in shown, True)
    os.write(ours, b"y\n")
    while b": allowed" not in shown:
        shown += os.read(ours, 4096)
    owner.send_signal(signal.SIGINT)
    owner.wait(600)
    equal("set_network: allowed", c.tool("set_network", reach=["a.example"])["reach"], ["a.example"])
    net = json.loads(subprocess.check_output([mayfly, "net", "--json", machine]))
    equal("net: in force", (net["mode"], net["proxy"]), ("allowlist", True))
    said = c.tool("exec", argv=["sh", "-c", "wget -qO- http://b.example/ || true"])
    equal("wget || true", said["exit_code"], 0)
    for _ in range(100):
        if "denied" in said:
            break
        said = c.tool("exec", argv=["true"])  # it was written down when wget had ended
    equal("a request that was refused cannot be hidden",
          [(d["host"], d["port"]) for d in said.get("denied", [])], [("b.example", 80)])
    equal("set_network: less", c.tool("set_network", reach=[]), {"state": "set", "reach": []})


class Http:
    """The endpoint over HTTP."""

    def __init__(self, *args, context=None):
        self.context = context
        self.process = subprocess.Popen(list(args), stdout=subprocess.PIPE)
        self.url = self.process.stdout.readline().decode().strip().replace("0.0.0.0", "localhost")
        with open(self.process.stdout.readline().decode().split()[1]) as f:
            self.token = f.read().strip()

    def post(self, method, params, **headers):
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {
            "Authorization": "Bearer " + self.token, "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream", **headers})
        try:
            answer = urllib.request.urlopen(request, timeout=600, context=self.context)
        except urllib.error.HTTPError as e:
            return e.code, {}, e.headers
        text = answer.read().decode()
        if answer.headers["Content-Type"] == "text/event-stream":
            text = [line for line in text.split("\n") if line.startswith("data: ")][-1][6:]
        return answer.status, json.loads(text), answer.headers


def over_http(mayfly, machine):
    """Both revisions, and nobody without the token."""
    h = Http(mayfly, "mcp", "--http", machine)
    say = {"name": "exec", "arguments": {"argv": ["echo", "over http"]}}
    said = h.post("tools/call", {**say, "_meta": MODERN}, **{
        "MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "exec"})
    equal("http: 2026-07-28", said[1]["result"]["structuredContent"]["stdout"], "over http\n")
    _, hello, headers = h.post("initialize", {"protocolVersion": "2025-11-25", "capabilities": {},
                                              "clientInfo": {"name": "http", "version": "1"}})
    session = {"Mcp-Session-Id": headers["Mcp-Session-Id"]}
    said = h.post("tools/call", say, **session)
    equal("http: 2025-11-25", (hello["result"]["protocolVersion"],
                               said[1]["result"]["structuredContent"]["stdout"]),
          ("2025-11-25", "over http\n"))
    equal("http: another token", h.post("ping", {}, Authorization="Bearer x")[0], 401)
    equal("http: a page from elsewhere", h.post("ping", {}, Origin="http://example.org")[0], 403)
    # Whoever hangs up ends what runs.
    line = http.client.HTTPConnection(h.url.split("/")[2])
    line.request("POST", "/mcp", json.dumps({
        "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
            "name": "exec", "arguments": {"argv": ["sleep", "7765"]}, "_meta": MODERN}}), {
        "Authorization": "Bearer " + h.token, "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "tools/call", "Mcp-Name": "exec"})

    def sleeps():
        answer = h.post("tools/call", {"name": "processes"}, **session)[1]
        processes = answer["result"]["structuredContent"]["processes"]
        return any("7765" in p["args"] for p in processes)

    while not sleeps():
        pass
    line.close()
    while sleeps():
        pass
    equal("http: hanging up ends what runs", sleeps(), False)
    h.process.terminate()
    equal("http: its end", h.process.wait(600), 0)


def over_tls(mayfly, machine):
    """Beyond the loopback, with a certificate."""
    subprocess.check_call(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                           "-nodes", "-days", "3650", "-subj", "/CN=localhost", "-addext",
                           "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"],
                          stderr=subprocess.DEVNULL)
    h = Http(mayfly, "mcp", "--http=0.0.0.0:0", "--tls-cert", "cert.pem", "--tls-key", "key.pem", machine,
             context=ssl.create_default_context(cafile="cert.pem"))
    said = h.post("initialize", {"protocolVersion": "2025-11-25", "capabilities": {},
                                 "clientInfo": {"name": "tls", "version": "1"}})
    equal("https", said[1]["result"]["serverInfo"]["name"], "mayfly")
    equal("https: another token", h.post("ping", {}, Authorization="Bearer x")[0], 401)
    h.process.terminate()
    equal("https: its end", h.process.wait(600), 0)


def levels(c, mayfly, machine):
    """A session that is open hears of a change, and it holds at once."""
    running = c.start("exec", argv=["sleep", "7764"])
    equal("set_access", c.tool("set_access", level="manage"), {"access": "manage"})
    equal("what runs above the level ends", words(c.wait(running)).startswith("the owner has lowered"),
          True)
    equal("a tool that is not granted is not there", "exec" in c.names(), False)
    equal("and cannot be called", c.tool("exec", argv=["true"])["error"]["code"], -32602)
    equal("no way back up", "only the owner" in words(c.tool("set_access", level="exec")), True)
    equal("the client is told", [n["method"] for n in c.notices],
          ["notifications/tools/list_changed"])
    other = Client(mayfly, "mcp", "--access", "observe", machine, modern=True)
    found = other.ask("server/discover")["result"]
    equal("server/discover", (found["supportedVersions"][0], found["resultType"]),
          ("2026-07-28", "complete"))
    equal("--access is a ceiling", "write_file" in other.names(), False)
    status = other.tool("status")
    equal("status", (status["state"], status["access"]), ("running", "manage"))
    equal("its end", other.leave(), 0)


def main():
    mayfly, machine = sys.argv[1:]
    c = Client(mayfly, "mcp", machine)
    hello = c.ask("initialize", protocolVersion="2025-11-25", capabilities={},
                  clientInfo={"name": "task", "version": "1"})["result"]
    equal("initialize", hello["protocolVersion"], "2025-11-25")
    c.write({"method": "notifications/initialized"})
    task(c, mayfly, machine)
    services(c)
    at_once(c)
    terminal(c)
    asking(c, mayfly, machine)
    over_http(mayfly, machine)
    over_tls(mayfly, machine)
    levels(c, mayfly, machine)
    equal("the session ends with its input", c.leave(), 0)
    sys.exit(failed)


main()
