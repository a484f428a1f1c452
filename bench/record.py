# SPDX-License-Identifier: Apache-2.0
"""What benches write down: the host, raw samples, and what may be said of them.

A results file is {"host": {…}, "samples": [{"what", "how", "x", "round", "values": {stage: ms}}], "text": {…}}.
`what` names the question, `how` the competitor, `x` the size in a series (0 where there is none).
"""
import datetime
import json
import os
import platform
import random
import re
import statistics
import subprocess


def output(*argv):
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def first_of(path, pattern, default="unknown"):
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            found = re.search(pattern, f.read(), re.M)
            return found.group(1) if found else default
    except OSError:
        return default


def host(mayfly):
    """What a reader needs to know to compare our figures with his."""
    doctor = json.loads(output(mayfly, "doctor", "--json") or "{}")
    here = os.path.dirname(os.path.abspath(__file__))
    return {
        "kind": doctor.get("host", "unknown"),
        "name": platform.node().strip("()") or "none",
        "cpu": first_of("/proc/cpuinfo", r"^model name\s*: (.*)"),
        "cpus": os.cpu_count(),
        "memory_mib": int(first_of("/proc/meminfo", r"^MemTotal:\s+(\d+)", "0")) >> 10,
        "kernel": platform.release(),
        "governor": first_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", r"(\S+)", "none"),
        "load": os.getloadavg()[0],
        "mayfly": output(mayfly, "--version"),
        "qemu": output("qemu-system-x86_64", "--version").partition("\n")[0] or "none",
        "commit": output("git", "-C", here, "describe", "--always", "--dirty") or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def quantile(values, q):
    """The smallest value that at least the share q of all does not exceed."""
    values = sorted(values)
    return values[max(0, -(-len(values) * q // 1).__int__() - 1)]


def ratio(a, b, rounds=1000):
    """The ratio of the medians of a and b, with its 95 % interval by resampling both. The same
    samples give the same interval."""
    draw = random.Random(1)
    again = sorted(statistics.median(draw.choices(a, k=len(a))) / statistics.median(draw.choices(b, k=len(b)))
                   for _ in range(rounds))
    return statistics.median(a) / statistics.median(b), again[rounds // 40], again[-rounds // 40 - 1]


def slope(points):
    """Least squares over [(x, y)]: y for each x more, and y at 0."""
    n = len(points)
    mean_x, mean_y = (sum(p[i] for p in points) / n for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return rise, mean_y - rise * mean_x


class Record:
    """Samples of one run."""

    def __init__(self, mayfly):
        self.host = host(mayfly)
        self.samples = []
        self.text = {}
        self.skipped = {}

    def add(self, what, how, turn, values, x=0):
        self.samples.append({"what": what, "how": how, "x": x, "round": turn, "values": values})

    def values(self, what, how, stage, x=0):
        return [s["values"][stage] for s in self.samples
                if (s["what"], s["how"], s["x"]) == (what, how, x) and stage in s["values"]]

    def names(self, what, key):
        """In the order in which they first came."""
        return list(dict.fromkeys(s[key] for s in self.samples if s["what"] == what))

    def noisy(self):
        """Why the times are worth little, or nothing."""
        if self.host["load"] > self.host["cpus"] / 2:
            return f"load {self.host['load']:.1f} on {self.host['cpus']} CPUs when the bench began"
        return ""

    def save(self, folder):
        os.makedirs(folder, exist_ok=True)
        day, kind = self.host["date"][:10], re.sub(r"\W+", "-", self.host["kind"])
        path = f"{folder}/{day}-{self.host['name']}-{kind}.json"
        with open(path + ".new", "w", encoding="utf-8") as f:
            json.dump({"host": self.host, "skipped": self.skipped, "samples": self.samples,
                       "text": self.text}, f, indent=1)
            f.write("\n")
        os.replace(path + ".new", path)
        return path
