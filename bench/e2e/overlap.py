"""Whether copies to a device hide behind its computing: passes with the weights on the host.

    python bench/e2e/overlap.py [--turns 7] [--out bench/reports]

On the emulated device, whose products and copies take as long as is set here: no figure of a real device.
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import zinf
from report import Report, Section, file_name
from torch import nn
from zinf import emulated

WIDTH, LAYERS = 1024, 12
WEIGHT_BYTES = 4 * WIDTH * WIDTH
LINK = 200e6  # bytes per second
ROOM = 4  # weights, and as many gradients
BATCHES = (16, 32, 64, 128, 256)
# A product with 64 rows takes as long as its weight's copy.
FLOPS = 2 * 64 * WIDTH * WIDTH / (WEIGHT_BYTES / LINK)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


@contextmanager
def managed() -> Iterator[nn.Module]:
    with zinf.Engine(weights="host", device_memory=2 * ROOM * WEIGHT_BYTES) as engine:
        yield engine.adopt(build().to("emu"))


def seconds(model: nn.Module, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(x).sum().backward()
    model.zero_grad()
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


def medians(
    sides: list[nn.Module], x: torch.Tensor, turns: int, say: Callable[[str], None]
) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(turns + 3):  # the first ones are learned from
        say(f"{x.shape[0]} rows, turn {turn + 1} of {turns + 3}")
        for side, own in zip(sides, times, strict=True):
            own.append(seconds(side, x))
    return [own[3:] for own in times]


def ratio(times: list[float], alone: list[float]) -> str:
    ratios = [a / b for a, b in zip(times, alone, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    options = parser.parse_args()
    if options.out and os.path.isdir(options.out):
        options.out = os.path.join(options.out, file_name("overlap"))
    emulated.enable(memory_bytes=512 << 20)
    emulated.set_pace(to_device=LINK, to_host=LINK, flops=FLOPS)
    report = Report("Copies to a device behind its computing", options.out)
    section = Section(
        f"{LAYERS} products of width {WIDTH}",
        f"Forward and backward. The emulated device computes {FLOPS / 1e9:.2f} GFLOP/s and copies "
        f"{LINK / 1e6:.0f} MB/s in each direction; it has room for {ROOM} of {LAYERS} weights and as many "
        "gradients. Compute alone: everything on the device. Medians (least-most) of "
        f"{options.turns} turns, sides one after the other.",
        ["rows", "compute alone s", "copies alone s", "zinf s", "ratio"],
    )
    report.sections.append(section)
    alone = build().to("emu")
    copies = 2 * LAYERS * WEIGHT_BYTES / LINK  # at most: each weight twice; gradients go the other way
    with managed() as ours:
        for rows in BATCHES:
            x = torch.randn(rows, WIDTH).to("emu")
            say = functools.partial(print, flush=True)
            times = medians([alone, ours], x, options.turns, say)
            mine, theirs = statistics.median(times[1]), statistics.median(times[0])
            section.rows.append(
                [str(rows), f"{theirs:.3f}", f"{copies:.3f}", f"{mine:.3f}", ratio(times[1], times[0])]
            )
            report.write()
    print(report.text())


if __name__ == "__main__":
    main()
