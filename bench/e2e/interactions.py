"""What each mechanism gives alone, in pairs and together, on this machine.

    python bench/e2e/interactions.py --nvme DIRECTORY [--size 124M] [--out REPORT.md]

The table that `zinf plan --beyond` simulates for a DGX-2, measured for what this engine can switch off: moves
ahead of uses, the update inside backward, states that stay in host memory, split masters. Needs a quiet
machine.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
from dataclasses import dataclass

from models import SIZES
from pairs import spread
from report import Report, Section, report_path
from setting import Setting, measure_need
from watch import Worker

KEPT_BYTES = 6  # per parameter, of 14 or 12
NOTE = """On the diagonal: alone. Weights are bfloat16, on NVMe with the states. All processes stand side \
by side and train in turns; a cell is the median (least-most) over rounds of the bare step's time, by that \
of the step with the mechanisms."""


@dataclass(frozen=True)
class Mechanism:
    name: str
    on: tuple = ()
    off: tuple = ()
    off_environment: tuple = ()


MECHANISMS = (
    Mechanism("overlap", off_environment=(("ZINF_PREFETCH", "0"),)),
    Mechanism("update in backward", on=("--update", "backward"), off=("--update", "step")),
    Mechanism("kept in host"),  # by its budget
    Mechanism("split master", on=("--master", "split"), off=("--master", "plain")),
)
KEPT = MECHANISMS[2]


def combinations() -> list[frozenset[Mechanism]]:
    """None, each, each pair, all."""
    sizes = (0, 1, 2, len(MECHANISMS))
    return [frozenset(some) for size in sizes for some in itertools.combinations(MECHANISMS, size)]


def start(setting: Setting, nvme: str, room: int, parameters: int, used: frozenset[Mechanism]) -> Worker:
    budget = room + (KEPT_BYTES * parameters if KEPT in used else 0)
    arguments = [argument for one in MECHANISMS for argument in (one.on if one in used else one.off)]
    environment = {
        name: value for one in MECHANISMS if one not in used for name, value in one.off_environment
    }
    return Worker(
        *setting.arguments(), "--host-memory", budget, "--nvme", nvme, *arguments, environment=environment
    )


def table(setting: Setting, gains: dict[frozenset[Mechanism], list[float]]) -> Section:
    names = [one.name for one in MECHANISMS]
    section = Section(f"Mechanisms alone, in pairs and together ({setting})", NOTE,
                      ["times as fast as with none", *names])  # fmt: skip
    for row in MECHANISMS:
        cells = [spread(gains[frozenset((row, column))]) for column in MECHANISMS]
        section.rows.append([row.name, *cells])
    section.after.append(f"All together: {spread(gains[frozenset(MECHANISMS)])}.")
    return section


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--size", default="124M", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    args = parser.parse_args()
    args.out = report_path(args.out, "interactions")
    setting = Setting(args.size, 1, 64, bf16=True)
    need = measure_need(setting, args.nvme)
    room = int(1.5 * need.least)
    with contextlib.ExitStack() as stack:
        workers = {
            used: stack.enter_context(start(setting, args.nvme, room, need.parameters, used))
            for used in combinations()
        }
        seconds: dict[frozenset[Mechanism], list[float]] = {used: [] for used in workers}
        for worker in workers.values():
            worker.train(3)
        for index in range(args.rounds):
            print(f"round {index + 1} of {args.rounds}", file=sys.stderr, flush=True)
            for used, worker in workers.items():
                seconds[used].append(worker.train(args.steps).step())
        losses = {tuple(worker.losses) for worker in workers.values()}
    bare = seconds[frozenset()]
    gains = {used: [b / s for b, s in zip(bare, times, strict=True)] for used, times in seconds.items()}
    section = table(setting, gains)
    section.after.append(
        f"{room / 1e6:.0f} MB of host memory ({KEPT_BYTES} bytes per parameter more where states are kept); "
        f"with none a step takes {statistics.median(bare):.2f} s. Losses are "
        f"{'the same, bit for bit' if len(losses) == 1 else 'NOT THE SAME'} in all of them."
    )
    Report("What mechanisms give each other", args.out, [section]).write()
    print(section.text())
    return 0 if len(losses) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
