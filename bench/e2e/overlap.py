"""Whether copies to and from a device hide behind its computing: steps with the weights on the host.

    python bench/e2e/overlap.py [--turns 7] [--out bench/reports]

On the emulated device, whose products and copies take as long as is set here: no figure of a real device.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import zinf
from lanes import svg
from report import Report, Section, report_path
from torch import nn
from zinf import emulated

WIDTH, LAYERS = 1024, 24
WEIGHT_BYTES = 4 * WIDTH * WIDTH
LINK = 200e6  # bytes per second
ROOM = 6  # weights, and as many gradients
STEPS = 2  # in a turn
BATCHES = (16, 32, 64, 96, 128)
# A product with 64 rows takes as long as its weight's copy.
FLOPS = 2 * 64 * WIDTH * WIDTH / (WEIGHT_BYTES / LINK)
COLUMNS = ("rows", "compute alone", "copies alone", "zinf", "of compute", "off", "off, of the sum",
           "off over on")  # fmt: skip
PAPER = "2: 1.29, 4: 1.19, 8: 1.09, 10: 1.05, 14: 1.01, 16: 1.02"  # batch per device: off over on


@dataclass
class Side:
    """Somebody's model, and an optimizer if it trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    engine: zinf.Engine | None = None

    def steps(self, x: torch.Tensor, count: int) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        for _ in range(count):
            self.model(x).sum().backward()
            if self.optimizer is not None:
                self.optimizer.step()
            self.model.zero_grad()
        torch.accelerator.synchronize()
        while self.engine is not None and self.engine.stats()["updates_waiting"]:
            time.sleep(1e-3)
        return (time.perf_counter() - begin) / count


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


@contextmanager
def managed(prefetch: bool) -> Iterator[Side]:
    os.environ["ZINF_PREFETCH"] = "1" if prefetch else "0"
    with zinf.Engine(weights="host", states="host", device_memory=2 * ROOM * WEIGHT_BYTES) as engine:
        model = engine.adopt(build().to("emu"))
        yield Side(model, zinf.AdamW(model.parameters(), lr=1e-6, update="backward"), engine)


def measure(sides: list[Side], x: torch.Tensor, turns: int, say: Callable[[str], None]) -> list[list[float]]:
    """Seconds of a step, by side and turn."""
    for side in sides:
        side.steps(x, 3)  # is learned from
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(turns):
        say(f"{x.shape[0]} rows, turn {turn + 1} of {turns}")
        for side, own in zip(sides, times, strict=True):
            own.append(side.steps(x, STEPS))
    return times


def ratio(times: list[float], others: list[float]) -> str:
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def row(rows: int, times: list[list[float]]) -> list[str]:
    alone, ours, off = times
    copies = 2 * LAYERS * WEIGHT_BYTES / LINK  # each weight twice; gradients go the other way
    sums = [own + copies for own in alone]
    seconds = [f"{statistics.median(own):.3f}" for own in times]
    return [str(rows), seconds[0], f"{copies:.3f}", seconds[1], ratio(ours, alone), seconds[2],
            ratio(off, sums), ratio(off, ours)]  # fmt: skip


def picture(side: Side, x: torch.Tensor, path: str) -> str:
    side.steps(x, 1)
    emulated.trace(True)
    side.steps(x, 1)
    lanes = [spans for spans in emulated.trace(False) if spans]
    names = ["computing", *[direction(spans) for spans in lanes[1:]]]
    title = f"one step with {x.shape[0]} rows: blue products, orange copies"
    with open(path, "w") as file:
        file.write(svg(list(zip(names, lanes, strict=True)), title))
    return f"![one step's lanes]({os.path.basename(path)})"


def direction(spans: list[tuple[str, int, int]]) -> str:
    return max((name for name, _, _ in spans), key=[name for name, _, _ in spans].count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--batches", type=lambda text: [int(rows) for rows in text.split(",")])
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    options = parser.parse_args()
    options.out = report_path(options.out, "overlap")
    emulated.enable(memory_bytes=512 << 20)
    emulated.set_pace(to_device=LINK, to_host=LINK, flops=FLOPS)
    report = Report("Copies to a device behind its computing", options.out)
    section = Section(
        f"{LAYERS} products of width {WIDTH}",
        f"Seconds of a step: forward, backward and, for zinf, the update on the host, which takes gradients "
        f"as they come. The emulated device computes {FLOPS / 1e9:.2f} GFLOP/s and copies "
        f"{LINK / 1e6:.0f} MB/s in each direction; it has room for {ROOM} of {LAYERS} weights and as many "
        "gradients. Compute alone: everything on the device, no update. Off: ZINF_PREFETCH=0, nothing comes "
        f"before it is needed. Medians (least-most) of {options.turns} turns of {STEPS} steps, sides one "
        f"after the other. In the paper's figure 6d, off over on is, by batch per device, {PAPER}.",
        COLUMNS,
    )
    report.sections.append(section)
    alone = Side(build().to("emu"))
    with managed(prefetch=True) as ours, managed(prefetch=False) as off:
        for rows in options.batches or BATCHES:
            x = torch.randn(rows, WIDTH).to("emu")
            times = measure([alone, ours, off], x, options.turns, lambda text: print(text, flush=True))
            section.rows.append(row(rows, times))
            report.write()
        if options.out:
            x = torch.randn(64, WIDTH).to("emu")
            section.after.append(picture(ours, x, options.out.removesuffix(".md") + "_lanes.svg"))
            report.write()
    print(report.text())


if __name__ == "__main__":
    main()
