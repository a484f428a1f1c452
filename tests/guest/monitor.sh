# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The monitor process by itself, `mayfly vmm`: who it dies with, what it inherits and reports, and
# signals at any moment of its start.
. "$(dirname "$0")/lib.sh"

# machine DIR: a folder with a vm.ini for the kernel that runs everything here.
machine() {
	mkdir -p "$1"
	printf '[machine]\nkernel = %s\ninitramfs = builtin\nmemory = 64M\n' \
		"$(realpath "$TEST_BUILD/vmlinux")" >"$1/vm.ini"
}

machine a
cat >tool.py <<'EOF'
import fcntl, json, os, random, signal, subprocess, sys, time

mayfly = os.environ["MAYFLY"]

def start(*args, reader=True, **kwargs):
    r, w = os.pipe()
    if not reader:
        os.close(r)
        r = None
    p = subprocess.Popen([mayfly, "vmm", "--status-fd", str(w), *args], pass_fds=[w], **kwargs)
    os.close(w)
    return p, os.fdopen(r) if r else None

def orphan():
    # Whoever started it has closed its end, as one does who dies: it must not go on.
    p, _ = start("--tied", "a", reader=False)
    assert p.wait(20) == 125, p.returncode
    assert not os.path.exists("a/run/lock")

def twice():
    p, out = start("a")
    assert json.loads(out.readline())["event"] == "running"
    q, second = start("a")
    said = json.loads(second.readline())
    assert said["event"] == "error" and "running already" in said["message"], said
    assert q.wait(20) == 125
    assert p.poll() is None
    p.terminate()
    assert json.loads(out.readline())["reason"] == "stopped"
    assert p.wait(20) == 0

def not_utf8():
    os.makedirs(b"b\xff", exist_ok=True)
    with open(b"b\xff/vm.ini", "wb") as f:
        f.write(b"[machine]\nkernel = /no/such\xff/kernel\n")
    p, out = start(b"b\xff")
    said = json.loads(out.readline())
    assert said["event"] == "error" and "/no/such?/kernel" in said["message"], said
    assert p.wait(20) == 125

def signals():
    # From before main() until the guest runs; the lock is free again each time.
    killed = stopped = 0
    for i in range(60):
        p, out = start("a")
        if i == 0:
            assert json.loads(out.readline())["event"] == "running"
        else:
            time.sleep(random.choice([0, random.random() * 0.01, random.random() * 0.1]))
        p.send_signal(random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
        status = p.wait(20)
        said = [json.loads(line) for line in out]
        if status == 0:
            stopped += 1
            assert said[-1]["event"] == "ended" and said[-1]["reason"] == "stopped", said
        else:
            killed += 1
            assert status in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP), (status, said)
            assert not said, said
        assert not os.path.exists("a/run/vsock.sock")
    assert stopped
    print(f"{killed} before it took signals, {stopped} later", file=sys.stderr)

def cut_short():
    # Guests run from the kernel's file itself.
    p, out = start("c")
    assert json.loads(out.readline())["event"] == "running"
    os.truncate("c/vmlinux", 0)
    said = json.loads(out.readline())
    assert said["event"] == "error" and "kernel" in said["message"], said
    print(said["message"], file=sys.stderr)
    assert p.wait(20) == 125

{"orphan": orphan, "cut_short": cut_short, "twice": twice, "not_utf8": not_utf8, "signals": signals}[sys.argv[1]]()
EOF

check "vmm --tied: not without the one it is tied to" python3 tool.py orphan
check "vmm: a machine runs once" python3 tool.py twice
check "vmm: a message that is not UTF-8 arrives" python3 tool.py not_utf8
check "vmm: signals while it starts" python3 tool.py signals

mkdir c
cp "$(realpath "$TEST_BUILD/vmlinux")" c/vmlinux
sed "s|^kernel = .*|kernel = $PWD/c/vmlinux|" a/vm.ini >c/vm.ini
check "vmm: a kernel that is cut short" python3 tool.py cut_short

# What the command has open besides is none of the monitor's business.
exec 7<tool.py
"$MAYFLY" run --timeout 300s -- sleep 1000 >out.txt 2>stderr.txt &
pid=$!
until monitor=$(pgrep -P $pid -x mayfly-vmm); do
	kill -0 $pid || break
	sleep 0.05
done
leaked=$(for fd in "/proc/$monitor/fd"/*; do readlink "$fd"; done | grep -c tool.py)
equal "run: the monitor inherits no descriptor" "$leaked" 0
kill -TERM $pid
wait $pid
check "run: nothing left" nothing_left
finish
