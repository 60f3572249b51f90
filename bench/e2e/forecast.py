"""Steps foretold by `zinf plan` beside steps of the engine on this machine.

    python bench/e2e/forecast.py --nvme DIRECTORY [--zinf COMMAND] [--out REPORT.md]

Every row trains HF's GPT-2 within a budget. What the forecast is told was measured in the same run: the plain
step of that model and batch, its update, its activations, and the disk. A step must be within 10 % of its
forecast, the most memory within 3 %. Needs a quiet machine.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from models import SIZES
from setting import Need, Setting, measure_need
from watch import Used, Worker, run

ADAM_BYTES = 28  # that an update moves per parameter, as src/plan/constants.h says
BATCHES = ((1, 64), (1, 256), (4, 256))
PLACES = ("ram", "states", "nothing")
TIME, MEMORY = 0.10, 0.03
HEADER = "| model | place | foretold s | measured s | | foretold GB | measured GB | |\n" + "|---" * 8 + "|"


class Plain:
    """Torch alone, everything in memory: what compute and an update take."""

    def __init__(self, setting: Setting, steps: int):
        with Worker(*setting.arguments(), "--plain") as worker:
            worker.train(1)
            before = worker.costs
            used = worker.train(steps)
            update = worker.costs["update_seconds"] - before["update_seconds"]
            self.parameters = worker.parameters
            self.update_seconds = update / steps / os.cpu_count()
            self.compute_seconds = used.step() - self.update_seconds
        self.outside = run(*setting.arguments(), "--plain", "--steps", 1)["left"]


class Forecasts:
    def __init__(self, args: argparse.Namespace, folder: str):
        self.args = args
        self.folder = pathlib.Path(folder)
        self.disk = json.loads(self._zinf("io", "bench", args.nvme, "--json"))

    def _zinf(self, *arguments: object) -> str:
        command = [self.args.zinf, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def _plan(self, setting: Setting, need: Need, cluster: dict) -> dict:
        size = SIZES[setting.size]
        config = {"model_type": "gpt2", "n_layer": size.layers, "n_embd": size.width, "n_head": size.heads,
                  "vocab_size": size.vocabulary}  # fmt: skip
        (self.folder / "config.json").write_text(json.dumps(config))
        (self.folder / "cluster.json").write_text(json.dumps(cluster))
        return json.loads(self._zinf("plan", self.folder, "--cluster", self.folder / "cluster.json",
                                     "--seq", setting.tokens, "--batch", setting.batch,
                                     "--micro-batches", 1, "--precision", "fp32", "--no-recompute",
                                     "--activation-bytes", need.activations, "--json"))  # fmt: skip

    def make(self, setting: Setting, need: Need, plain: Plain, budget: int) -> dict:
        cluster = {"name": "here", "on_host": True, "host_bytes": budget, "nvme_bytes": 1e12,
                   "peak_flops": 1e12, "achieved": 1.0,
                   "host_memory_rate": ADAM_BYTES * plain.parameters / plain.update_seconds,
                   "nvme_read_rate": self.disk["read_gbps"] * 1e9,
                   "nvme_write_rate": self.disk["write_gbps"] * 1e9}  # fmt: skip
        model = self._plan(setting, need, {**cluster, "host_bytes": 1e15})
        cluster["peak_flops"] *= model["compute_seconds"] / plain.compute_seconds
        return self._plan(setting, need, cluster)


def measure(setting: Setting, need: Need, place: str, nvme: str, steps: int) -> tuple[Used, int]:
    with Worker(*setting.arguments(), *setting.place(place).arguments(need, nvme)) as worker:
        worker.train(3)  # plans are made, moves are ahead
        turns = [worker.train(steps) for _ in range(3)]
        return sorted(turns, key=Used.step)[1], worker.peak_bytes()


def row(forecasts: Forecasts, setting: Setting, place: str, need: Need, plain: Plain) -> tuple[str, bool]:
    args = forecasts.args
    budget = setting.place(place).budget(need)
    foretold = forecasts.make(setting, need, plain, budget)
    used, peak = measure(setting, need, place, args.nvme, args.steps)
    host = next(tier for tier in foretold["tiers"] if tier["tier"] == "host")
    held = host["taken_bytes"] + foretold["kept_bytes"]
    memory = (peak - plain.outside) / held - 1
    time = used.step() / foretold["step_seconds"] - 1
    text = (f"| {setting} | {setting.place(place).name} | {foretold['step_seconds']:.2f} | {used.step():.2f} "
            f"| {100 * time:+.1f} % | {held / 1e9:.2f} | {(peak - plain.outside) / 1e9:.2f} "
            f"| {100 * memory:+.1f} % |")  # fmt: skip
    return text, abs(time) <= TIME and abs(memory) <= MEMORY


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--zinf", default=os.path.join(os.path.dirname(sys.executable), "zinf"))
    parser.add_argument("--sizes", nargs="+", default=["124M", "640M"], choices=SIZES)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", help="a file for the report")
    args = parser.parse_args()
    lines, good = [HEADER], []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        forecasts = Forecasts(args, folder)
        for size in args.sizes:
            for batch, tokens in BATCHES:
                setting = Setting(size, batch, tokens)
                need, plain = measure_need(setting, args.nvme), Plain(setting, args.steps)
                for place in PLACES:
                    text, within = row(forecasts, setting, place, need, plain)
                    lines.append(text)
                    good.append(within)
                    print(text, flush=True)
    lines += ["", f"{sum(good)} of {len(good)} within {100 * TIME:.0f} % of time and {100 * MEMORY:.0f} % of "
              f"memory; share {statistics.mean(good):.2f}."]  # fmt: skip
    print(lines[-1])
    if args.out:
        pathlib.Path(args.out).write_text("\n".join(lines) + "\n")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
