#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Everything that this host can measure: report.py [--quick] [--out FOLDER] [--rounds N] BUILD

Writes DATE-HOST.json (the host and the raw samples), and beside it a report with plots
(DATE-HOST.md, *.svg; gnuplot draws them). Times are reported, never gated; budgets.py gates counts.
`make bench` runs it here, `make bench-lab` in the emulated AMD host, where QEMU runs beside us.
"""
import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import starts  # noqa: E402
from record import Record, quantile, ratio, slope  # noqa: E402

OTHERS = (("snapshot", ["snapshot.py", "{build}/mayfly", "{few}"]),
          ("exec", ["exec.py", "{build}/mayfly", "{many}"]))
IN_LAB = (("disk", ["disk.py", "{build}", "{few}"]), ("net", ["net.py", "{build}", "{few}"]),
          ("ssh", ["ssh.py", "{build}", "{many}"]))


def progress(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


def plot(path, title, x, y, lines, log=""):
    """lines: name -> [(x, y)]. Draws path, an SVG, or does without where gnuplot is missing."""
    if not shutil.which("gnuplot") or not any(lines.values()):
        return False
    text = [f"set terminal svg size 640,360 background '#ffffff'; set output '{path}'",
            f"set title '{title}'; set xlabel '{x}'; set ylabel '{y}'; set key left top; set grid",
            "set yrange [0:*]"] + ([f"set logscale {log}"] if log else [])
    for i, points in enumerate(lines.values()):
        text += [f"$d{i} << EOD", *(f"{a} {b}" for a, b in points), "EOD"]
    text.append("plot " + ", ".join(f"$d{i} with linespoints pt 7 title '{name}'"
                                    for i, name in enumerate(lines)))
    return subprocess.run(["gnuplot"], input="\n".join(text), text=True, check=False).returncode == 0


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + " --- |" + " ---: |" * (len(head) - 1),
            *("| " + " | ".join(row) + " |" for row in rows), ""]


def quantiles(values):
    return [f"{quantile(values, q):.2f}" for q in (0.5, 0.95, 0.99)] + [f"{max(values):.2f}", str(len(values))]


QUANTILES = ["p50", "p95", "p99", "max", "n"]


def stages(record, what, x=0):
    """A table of each way to start, with its stages in the order in which they happen."""
    out = []
    for how in record.names(what, "how"):
        stage_names = next(s["values"] for s in record.samples if s["what"] == what and s["how"] == how)
        times = [n for n in stage_names if not n.startswith(("exits", "monitor"))]
        out += [f"**{how}**", ""] + table(
            ["ms"] + QUANTILES, [[name] + quantiles(record.values(what, how, name, x)) for name in times])
        counted = [f"{name} {statistics.median(record.values(what, how, name, x)):g}"
                   for name in stage_names if name not in times]
        if counted:
            out += ["Counted, the median: " + ", ".join(counted) + ".", ""]
    return out


def compared(record):
    """The aims that concern starts, as ratios with their 95 % intervals."""
    rows = []
    def row(name, a, b, aim):
        if a and b:
            rows.append([name, "%.3f" % ratio(a, b)[0], "%.3f to %.3f" % ratio(a, b)[1:], aim])
    cold, warm = (record.values("alone", how, starts.ANSWERED) for how in ("cold", "warm"))
    for how in record.names("alone", "how"):
        if how not in ("cold", "warm"):
            row(f"cold, mayfly : {how}", cold, record.values("alone", how, starts.ANSWERED),
                "at most 0.5" if how.startswith("QEMU") else "")
    row("warm : cold", warm, cold, "at most 0.033")
    row("exec while others start : alone", *(record.values("exec", how, "exec") for how in
        (next((h for h in record.names("exec", "how") if h != "alone"), ""), "alone")), "")
    return table(["first exec answered", "ratio", "95 % interval", "aim"], rows) if rows else []


def series(record, base, what, title, x_name, stage, y_name="ms"):
    """A plot with the slope of each line."""
    lines, said = {}, []
    for how in record.names(what, "how"):
        points = [(x, statistics.median(record.values(what, how, stage, x)))
                  for x in sorted(record.names(what, "x")) if record.values(what, how, stage, x)]
        lines[how] = points
        if len(points) > 1:
            rise, at_zero = slope(points)
            said.append(f"{how}: {at_zero:.1f} {y_name} and {rise:.4f} {y_name} for each {x_name}")
    if not said:
        return []
    path = f"{base}-{what.replace(' ', '-')}.svg"
    out = [f"### {title}", ""]
    if plot(path, title, x_name, f"{stage}, {y_name}", lines):
        out += [f"![{title}]({os.path.basename(path)})", ""]
    else:
        out += table([x_name] + list(lines), [[str(p[0])] + [f"{line[i][1]:.1f}" for line in lines.values()]
                                              for i, p in enumerate(next(iter(lines.values())))])
    return out + ["Least squares over the medians: " + "; ".join(said) + ".", ""]


def write(record, base):
    h = record.host
    out = [f"# mayfly on {h['kind']}, {h['date'][:10]}", "",
           f"{h['mayfly']}, commit {h['commit']}; {h['cpu']}, {h['cpus']} CPUs, {h['memory_mib']} MiB; "
           f"Linux {h['kernel']}, governor {h['governor']}; {h['qemu']}; load {h['load']:.2f} at the start.", ""]
    if record.noisy():
        out += [f"**The machine was busy ({record.noisy()}): the ratios may stand, the times say little.**", ""]
    out += [f"Not measured: {name}: {why}." for name, why in record.skipped.items()] + [""]
    out += ["## Starts, one at a time", ""] + compared(record) + stages(record, "alone")
    if record.names("at once", "x"):
        out += ["## Many at once", ""]
        out += table(["warm starts at the same moment"] + QUANTILES,
                     [[str(x)] + quantiles(record.values("at once", "warm", starts.ANSWERED, x))
                      for x in record.names("at once", "x")])
        out += series(record, base, "at once", "Warm starts at once", "machine", starts.ANSWERED)
    if record.names("exec", "how"):
        out += ["## Running work beside them", ""]
        out += table(["exec true, ms"] + QUANTILES, [[how] + quantiles(record.values("exec", how, "exec"))
                                                     for how in record.names("exec", "how")])
    out += ["## Memory of an idle clone", ""]
    out += table(["KiB"] + QUANTILES, [[name] + quantiles(record.values("idle", "fork", name))
                                       for name in ("PSS", "private", "RSS")])
    scaling = series(record, base, "memory", "Against the size of memory", "MiB", starts.ANSWERED)
    scaling += series(record, base, "chain", "Against the length of the snapshot chain", "diff",
                      "fork to first exec")
    if scaling:
        out += ["## Scaling", ""] + scaling
    for name, text in record.text.items():
        out += [f"## {name}", "", "```", text.rstrip(), "```", ""]
    with open(base + ".md", "w", encoding="utf-8") as f:
        f.write("\n".join(out))
    return base + ".md"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--quick", action="store_true", help="starts alone and memory, few rounds")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--at-once", default="1,10,64", metavar="N,N")
    parser.add_argument("--sizes", default="64,256,1024,4096", metavar="MIB,MIB")
    parser.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "results"))
    options = parser.parse_args()
    build = os.path.abspath(options.build)
    mayfly = f"{build}/mayfly"
    work = tempfile.mkdtemp(prefix="mayfly-bench-")
    os.environ["MAYFLY_HOME"] = f"{work}/home"
    record = Record(mayfly)
    if record.noisy():
        progress(f"warning: {record.noisy()}: the times will say little")
    try:
        starts.alone(record, build, options.rounds, progress)
        starts.idle(record, build, 4, progress)
        if not options.quick:
            numbers = [int(n) for n in options.at_once.split(",")]
            starts.at_once(record, build, numbers, 2, progress)
            starts.beside(record, build, 10, 2 * options.rounds, progress)
            starts.scaling(record, build, [int(n) for n in options.sizes.split(",")], 3, progress)
            starts.chains(record, build, (0, 1, 5, 10), 3, progress)
            others = OTHERS + (IN_LAB if "QEMU" not in record.skipped else ())
            for name, argv in others:
                argv = [a.format(build=build, few=3, many=4 * options.rounds) for a in argv]
                progress(f"{name}: {' '.join(argv)}")
                done = subprocess.run([f"{os.path.dirname(os.path.abspath(__file__))}/{argv[0]}", *argv[1:]],
                                      stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
                if done.returncode:
                    record.skipped[name] = "it failed: " + (done.stderr.strip().splitlines() or ["?"])[-1]
                else:
                    record.text[name] = done.stdout
    finally:
        shutil.rmtree(work, ignore_errors=True)
    path = record.save(options.out)
    print(path)
    print(write(record, path.removesuffix(".json")))


main()
