# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Guests that attack their monitor (tests/escape/hostile.c): it goes on or ends the machine in good
# order, stays small, and neither the machine beside it nor a file outside notices. FULL=1: for long.
. "$(dirname "$0")/lib.sh"

if [ ! -x "$TEST_BUILD/tests/escape/hostile" ]; then
	skip "hostile guests: not for this architecture"
	finish
fi
if [ -n "${FULL:-}" ]; then seeds=$(seq 1 100) rounds=1000; else seeds="1 2 3" rounds=30; fi

"$MAYFLY" up --timeout "$GUEST_TIMEOUT" neighbour 2>stderr.txt
equal "the neighbour is up" $? 0
"$MAYFLY" exec neighbour -- sh -c 'head -c 100000 /dev/urandom >/tmp/data; sha256sum </tmp/data >/tmp/sum'

# What lies around the machines' folders: it must stay as it is.
mkdir outside
echo canary >outside/canary
ln -s ../outside/canary link
sums() { find . -path ./m -prune -o -type f -print0 | sort -z | xargs -0 sha256sum; ls -lR outside; }

cat >attack.py <<'EOF'
# attack.py ROUNDS SEED…: runs the machine m once for each, and listens on some of the ports that the
# guest calls. Says what was tried; fails where the monitor does.
import json, os, re, select, socket, subprocess, sys, threading

mayfly = os.environ["MAYFLY"]
ini = """[machine]
kernel = {build}/tests/escape/hostile
initramfs =
memory = 64M
append = seed={seed} rounds={rounds} flood={flood}
[disk]
file = {here}/m/disk.img
mode = raw
[disk2]
size = 4M
"""
tried, calls, worst_kib = {}, 0, 0

def listen(port):
    s = socket.socket(socket.AF_UNIX)
    s.bind(f"m/run/vsock.sock_{port}")
    s.listen(64)
    s.setblocking(False)
    return s

for i, seed in enumerate(sys.argv[2:]):
    subprocess.run(["rm", "-rf", "m"], check=True)
    os.makedirs("m/run")
    with open("m/disk.img", "wb") as f:
        f.truncate(4 << 20)
    # The first floods the console past what is kept of it.
    flood = 560000 if i == 0 else 1000
    with open("m/vm.ini", "w") as f:
        f.write(ini.format(build=os.environ["TEST_BUILD"], seed=seed, rounds=sys.argv[1], flood=flood, here=os.getcwd()))
    ini_before = open("m/vm.ini").read()
    listeners = [listen(port) for port in (52, 1024, 1025, 5000, 8080)]
    r, w = os.pipe()
    log = open("m.log", "wb")
    p = subprocess.Popen([mayfly, "vmm", "--status-fd", str(w), "m"], pass_fds=[w], stderr=log)
    os.close(w)
    open_ones, told = {}, b""
    while True:
        ready, _, _ = select.select([r, *listeners, *open_ones], [], [])
        for s in ready:
            if s == r:
                continue
            if s in open_ones:
                try:
                    data = s.recv(65536)
                except OSError:
                    data = b""
                open_ones[s] += len(data)
                if not data:
                    del open_ones[s]
                    s.close()
            else:
                c, _ = s.accept()
                calls += 1
                c.setblocking(False)
                open_ones[c] = 0
                if len(open_ones) > 200:
                    old = next(iter(open_ones))
                    del open_ones[old]
                    old.close()
        if r in ready:
            data = os.read(r, 65536)
            told += data
            if not data:
                break
    status = p.wait()
    events = [json.loads(line) for line in told.splitlines()]
    console = open("m/console.log", "rb").read()
    words = open("m.log", errors="replace").read()
    where = f"seed {seed}"
    assert status == 0, (where, status, events, words[-2000:])
    assert events[-1]["event"] == "ended" and events[-1]["reason"] == "reset", (where, events)
    assert "jail" not in words and "error" not in words, (where, words)
    last = re.findall(rb"hostile:((?: \w+=\d+)+) done", console)
    assert last, (where, console[-300:])
    for name, n in re.findall(r"(\w+)=(\d+)", last[-1].decode()):
        tried[name] = tried.get(name, 0) + int(n)
    worst_kib = max(worst_kib, events[-1]["monitor_rss_kib"])
    kept = sum(os.path.getsize(f"m/{name}") for name in ("console.log", "console.log.1"))
    assert kept <= 1 << 20, (where, kept)
    if flood > 512 << 10:
        assert os.path.getsize("m/console.log.1") > 400 << 10, os.listdir("m")
    assert open("m/vm.ini").read() == ini_before, where
    assert sorted(os.listdir("m")) == ["console.log", "console.log.1", "disk.img", "disk2.overlay", "run", "vm.ini"], os.listdir("m")
    assert os.path.getsize("m/disk.img") == 4 << 20
assert tried["devices"] == 5 * (len(sys.argv) - 2), tried
assert worst_kib < 64 << 10, worst_kib
assert calls > 0
tried.pop("devices")
print("tried", ", ".join(f"{n} {name}" for name, n in tried.items()), f"in {len(sys.argv) - 2} machines;",
      f"{calls} calls to listeners; monitors of at most {worst_kib} KiB")
EOF
sums >before.txt 2>/dev/null
sums >before.txt
# shellcheck disable=SC2086
if python3 attack.py $rounds $seeds >said.txt 2>why.txt; then
	ok "hostile guests: $(cat said.txt)"
else
	fail "hostile guests: $(tail -n 3 why.txt)"
fi
rm -rf m m.log said.txt why.txt
sums >after.txt
equal "nothing outside has changed" "$(diff before.txt after.txt | grep -v 'before.txt$\|after.txt$' | grep '^[<>]')" ""
equal "the neighbour has its data" \
	"$("$MAYFLY" exec neighbour -- sh -c 'sha256sum </tmp/data | cmp - /tmp/sum && echo same')" same
equal "the neighbour is confined still" "$("$MAYFLY" doctor --vm neighbour | tail -n 1)" confined
"$MAYFLY" rm --force neighbour
check "nothing left" nothing_left
finish
