"""Steps foretold by `zinf plan` beside steps of the engine on this machine.

    python bench/e2e/forecast.py --nvme DIRECTORY [--zinf COMMAND] [--keep FILE] [--out REPORT.md]

Every row trains HF's GPT-2 within a budget, in turns with a process that has everything in memory: the median
of their ratios counts, so that what else the machine does concerns both. What the forecast is told was
measured in the same run: the disk (`zinf io bench`), a step in memory, its update and its activations, and
what a moved byte takes from the compute: what a step with one of the budgets takes longer than one in
memory, by the bytes that it moves (many of them, as times are not exact). Of that budget, as of the one for
everything, only the peak is a forecast. (fio beside a step in memory takes less than half of that from it.)
A step must be within 10 % of its forecast, the most memory within 3 %. Needs a quiet machine.

--keep: a file for what was measured; where it exists nothing is measured again.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from models import SIZES
from report import Report, Section, report_path
from setting import Need, Setting, measure_need
from watch import Worker, run

ADAM_BYTES = 28  # that an update moves per parameter, as src/plan/constants.h says
BATCHES = ((1, 64), (1, 128), (1, 192))
RESIDENT = (0, 2, 4, 6, 8)  # bytes per parameter that may stay in memory, beside room to move in
TOLD = 2  # the one that says what a byte takes from the compute
EVERYTHING = 12
STEPS = 2  # of a turn
TIME, MEMORY = 0.10, 0.03
COLUMNS = ("model, batch", "host_memory GB", "foretold s", "measured s", "off", "foretold GB", "measured GB",
           "off", "foretold B per parameter", "measured")  # fmt: skip
NOTE = """A row is a budget; its time is the median (least-most) of its turns with a process that has \
everything in memory, by that process's steps of the same turns. What the forecast was told was measured in \
the same run: the disk, a step in memory, its update and its activations, and what a byte on its way takes \
from the compute, from one budget of each batch. These rows, whose times are no forecasts therefore, are \
marked as told. Memory is the most anonymous and shared memory of the process, seen from outside, less that \
of one without a model."""


@dataclass(frozen=True)
class Measured:
    """What the forecasts of a setting are told."""

    parameters: int
    activations: int
    least: int
    outside: int  # memory of the process without a model
    step_seconds: float  # in memory
    update_seconds: float  # of it
    memory_peak: int

    def need(self) -> Need:
        return Need(self.parameters, self.activations, self.least)

    def budget(self, resident: int) -> int:
        return resident * self.parameters + self.need().room()

    def drag(self, rows: list[dict]) -> float:
        """Seconds of compute per byte that is moved."""
        told = next(row for row in rows if row["resident"] == TOLD)
        return max(0.0, told["ratio"] - 1) * self.step_seconds / told["bytes"]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def measure_row(setting: Setting, budget: int, in_memory: Worker, args: argparse.Namespace) -> dict:
    """In turns with steps in memory: how many of these a step takes."""
    with Worker(*setting.arguments(), "--host-memory", budget, "--update", "backward",
                "--nvme", args.nvme) as worker:  # fmt: skip
        worker.train(2)  # plans are made
        pairs, moved = [], 0
        for _ in range(args.turns):
            reference = in_memory.train(1).step()
            used = worker.train(STEPS)
            pairs.append((used.step(), reference))
            moved += used.bytes_read + used.bytes_written
        ratios = [step / reference for step, reference in pairs]
        return {"budget": budget, "ratio": statistics.median(ratios), "ratios": ratios,
                "references": [reference for _, reference in pairs],
                "bytes": moved / (STEPS * args.turns), "peak": worker.peak_bytes()}  # fmt: skip


def measure_setting(setting: Setting, args: argparse.Namespace) -> dict:
    need = measure_need(setting, args.nvme)
    outside = run("--size", "124M", "--plain", "--steps", 1)["left"]
    budget = EVERYTHING * need.parameters + need.room()
    with Worker(*setting.arguments(), "--host-memory", budget, "--update", "backward") as in_memory:
        in_memory.train(1)
        before = in_memory.costs
        in_memory.train(STEPS)
        updates = {key: in_memory.costs[key] - before[key] for key in ("update_seconds", "updated")}
        peak = in_memory.peak_bytes()
        rows = []
        for resident in RESIDENT:
            row = measure_row(setting, resident * need.parameters + need.room(), in_memory, args)
            rows.append({"resident": resident, **row})
            say(f"{setting}: {rows[-1]}")
    step = statistics.median(reference for row in rows for reference in row["references"])
    update = updates["update_seconds"] / updates["updated"] * need.parameters / os.cpu_count()
    known = Measured(need.parameters, need.activations, need.least, outside, step, update, peak)
    say(f"{setting}: {known}")
    return {"size": setting.size, "batch": setting.batch, "tokens": setting.tokens, "known": known.__dict__,
            "rows": rows}  # fmt: skip


def measure(args: argparse.Namespace) -> dict:
    def rate(way: str) -> float:
        bench = [args.zinf, "io", "bench", args.nvme, f"--{way}", "--size", "4GiB", "--json"]
        out = json.loads(subprocess.run(bench, capture_output=True, text=True, check=True).stdout)
        return out[f"{way}_gbps"] * 1e9

    disk = {way: rate(way) for way in ("read", "write", "mix")}
    say(f"disk: {disk}")
    settings = []
    for size in args.sizes:
        for batch, tokens in BATCHES:
            settings.append(measure_setting(Setting(size, batch, tokens), args))
    return {"disk": disk, "settings": settings}


class Forecasts:
    """What `zinf plan` says."""

    def __init__(self, args: argparse.Namespace, folder: str, disk: dict):
        self.args = args
        self.folder = pathlib.Path(folder)
        self.disk = disk

    def _plan(self, setting: Setting, known: Measured, cluster: dict) -> dict:
        size = SIZES[setting.size]
        config = {"model_type": "gpt2", "n_layer": size.layers, "n_embd": size.width, "n_head": size.heads,
                  "vocab_size": size.vocabulary}  # fmt: skip
        (self.folder / "config.json").write_text(json.dumps(config))
        (self.folder / "cluster.json").write_text(json.dumps(cluster))
        command = [self.args.zinf, "plan", self.folder, "--cluster", self.folder / "cluster.json",
                   "--seq", setting.tokens, "--batch", setting.batch, "--micro-batches", 1,
                   "--precision", "fp32", "--no-recompute", "--activation-bytes", known.activations,
                   "--json"]  # fmt: skip
        result = subprocess.run([*map(str, command)], capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(result.stderr + result.stdout)
        return json.loads(result.stdout)

    def make(self, setting: Setting, known: Measured, drag: float, budget: int) -> dict:
        cluster = {"name": "here", "on_host": True, "host_bytes": budget, "nvme_bytes": 1e12,
                   "peak_flops": 1e12, "achieved": 1.0,
                   "host_memory_rate": ADAM_BYTES * known.parameters / known.update_seconds,
                   "nvme_read_rate": self.disk["read"], "nvme_write_rate": self.disk["write"],
                   "nvme_rate": self.disk["mix"], "nvme_drag": drag}  # fmt: skip
        model = self._plan(setting, known, {**cluster, "host_bytes": 1e15})
        compute = known.step_seconds - known.update_seconds
        cluster["peak_flops"] *= model["compute_seconds"] / compute
        return self._plan(setting, known, cluster)


def held_bytes(foretold: dict) -> float:
    host = next(tier for tier in foretold["tiers"] if tier["tier"] == "host")
    return host["taken_bytes"] + foretold["kept_bytes"]


def nvme_bytes(foretold: dict) -> float:
    return sum(lane["bytes"] for lane in foretold["lanes"] if "NVMe" in lane["lane"])


def row(
    forecasts: Forecasts, setting: Setting, known: Measured, drag: float, measured: dict
) -> tuple[list[str], float, float]:
    foretold = forecasts.make(setting, known, drag, measured["budget"])
    held, peak = held_bytes(foretold), measured["peak"] - known.outside
    seconds = measured["ratio"] * known.step_seconds
    time, memory = seconds / foretold["step_seconds"] - 1, peak / held - 1
    times = [ratio * known.step_seconds for ratio in measured["ratios"]]
    cells = [str(setting), f"{measured['budget'] / 1e9:.2f}", f"{foretold['step_seconds']:.2f}",
             f"{seconds:.2f} ({min(times):.2f}-{max(times):.2f})", f"{100 * time:+.1f} %",
             f"{held / 1e9:.2f}", f"{peak / 1e9:.2f}", f"{100 * memory:+.1f} %",
             f"{nvme_bytes(foretold) / known.parameters:.1f}",
             f"{measured['bytes'] / known.parameters:.1f}"]  # fmt: skip
    return cells, time, memory


def compare(args: argparse.Namespace, measured: dict) -> tuple[Section, bool]:
    section, times, memories = Section("Steps and what was foretold of them", NOTE, COLUMNS), [], []
    drags = []
    with tempfile.TemporaryDirectory() as folder:
        forecasts = Forecasts(args, folder, measured["disk"])
        for one in measured["settings"]:
            setting, known = Setting(one["size"], one["batch"], one["tokens"]), Measured(**one["known"])
            drags.append(known.drag(one["rows"]))
            in_memory = {"resident": EVERYTHING, "budget": known.budget(EVERYTHING), "ratio": 1.0,
                         "ratios": [1.0], "bytes": 0, "peak": known.memory_peak}  # fmt: skip
            for which in (*one["rows"], in_memory):
                cells, time, memory = row(forecasts, setting, known, drags[-1], which)
                section.rows.append(cells)
                memories.append(memory)
                if which["resident"] in (TOLD, EVERYTHING):
                    cells[4] = "told"
                else:
                    times.append(time)
    good = [
        sum(abs(value) <= bound for value in values) for values, bound in ((times, TIME), (memories, MEMORY))
    ]
    disk = ", ".join(f"{way} {rate / 1e9:.2f}" for way, rate in measured["disk"].items())
    taken = ", ".join(f"{1e9 * drag:.3f}" for drag in drags)
    errors = [100 * statistics.mean(map(abs, values)) for values in (times, memories)]
    section.after.append(
        f"{good[0]} of {len(times)} steps within {100 * TIME:.0f} %, {good[1]} of {len(memories)} peaks "
        f"within {100 * MEMORY:.0f} %. Mean error of a step {errors[0]:.1f} %, of a peak {errors[1]:.1f} %. "
        f"The disk: {disk} GB/s; a GB takes {taken} s from the compute."
    )
    return section, good == [len(times), len(memories)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--zinf", default=os.path.join(os.path.dirname(sys.executable), "zinf"))
    parser.add_argument("--sizes", nargs="+", default=["640M"], choices=SIZES)
    parser.add_argument("--turns", type=int, default=7, help="of a row")
    parser.add_argument("--keep", help="a file for what was measured")
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    args = parser.parse_args()
    args.out = report_path(args.out, "forecast")
    keep = pathlib.Path(args.keep) if args.keep else None
    measured = json.loads(keep.read_text()) if keep and keep.exists() else measure(args)
    if keep:
        keep.write_text(json.dumps(measured, indent=1))
    section, good = compare(args, measured)
    report = Report("zinf plan beside the engine", args.out, [section])
    report.write()
    print(section.text())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
