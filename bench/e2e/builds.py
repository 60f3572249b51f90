"""How fast a build of zinf is beside an older one.

    python bench/e2e/builds.py --nvme DIRECTORY --before OTHER/build/release/python [--out bench/reports]

--before is the package folder of another build tree. Both builds train the same model in the same place, in
turns; a ratio is the median of the pairs. Needs a quiet machine, and for 640 M parameters 24 GB of memory and
20 GB on the disk. For a try of a minute: --size 2M --pairs 1.
"""

import argparse
import os
import signal
import statistics
import sys

from context import Bench, Fresh
from models import SIZES
from pairs import spread
from report import Report, Section, report_path
from rows import moved, others
from setting import Place, Setting
from watch import Used, WorkerError

PLACES = ("ram", "states", "nothing")
COLUMNS = ("model, batch", "place", "before s/step", "after s/step", "ratio",
           "CPU s/step after (before)", "B per parameter and step after (before)", "losses",
           "others' CPU")  # fmt: skip
NOTE = """\
Seconds of a step until all of its bytes are on the disk, medians; the ratio is after over before, the \
median (least-most) of interleaved pairs. "Losses": whether both builds have the same, bit for bit."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", required=True, help="a directory on the disk to use")
    parser.add_argument("--before", required=True, help="the folder of the other build's package")
    parser.add_argument("--rows", default=",".join(PLACES), help=f"any of {PLACES}")
    parser.add_argument("--size", choices=SIZES, default="640M")
    parser.add_argument("--tokens", default="1x64", help="batches, as rows x tokens")
    parser.add_argument("--compile", action="store_true", help="torch.compile for the model")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, help="of a side of a pair; by default those of --seconds")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    args = parser.parse_args()
    args.rows = args.rows.split(",")
    if unknown := set(args.rows) - set(PLACES):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}; there are {', '.join(PLACES)}")
    if not os.path.isdir(os.path.join(args.before, "zinf")):
        parser.error(f"--before: there is no folder zinf in {args.before}")
    args.out = report_path(args.out, "builds")
    return args


def measure(bench: Bench, table: Section, setting: Setting, place: Place) -> bool:
    """A row of the table; whether the losses were the same."""
    need = bench.need(setting)
    arguments = place.arguments(need, bench.nvme)
    if bench.args.compile:  # its backward gives all gradients at once
        arguments += ["--compile", "--host-memory", place.budget(need) + 4 * need.parameters]
    held = place.held(need)

    def older():
        return bench.zinf(setting, *arguments, PYTHONPATH=bench.args.before)

    def newer():
        return bench.zinf(setting, *arguments)

    if bench.fit_in_turns(held, held):
        before, after = older(), newer()
        if not bench.fit(held, held):
            before.keep_small()
            after.keep_small()
    else:
        before, after = Fresh(need.parameters, older), Fresh(need.parameters, newer)
    with before, after:
        pairs = bench.interleave(before.train, after.train)
    same = before.losses[: len(after.losses)] == after.losses[: len(before.losses)]

    def median(side: list[Used], of) -> float:
        return statistics.median(map(of, side))

    table.rows.append([
        str(setting), place.name, f"{median(pairs.reference, Used.step):.2f}",
        f"{median(pairs.candidate, Used.step):.2f}", spread(pairs.ratios(), 3),
        f"{median(pairs.candidate, Used.cpu):.2f} ({median(pairs.reference, Used.cpu):.2f})",
        f"{moved(pairs.candidate, need.parameters)} ({moved(pairs.reference, need.parameters)})",
        "the same" if same else "OTHERS", others(pairs)])  # fmt: skip
    bench.say(f"ratio {spread(pairs.ratios(), 3)}")
    return same


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the disk is tidied up
    title = "Two builds, compiled" if args.compile else "Two builds"
    report = Report(title, args.out, [Section("After beside before", NOTE, COLUMNS)])
    bench = Bench(args)
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.tokens.split(",")]
    tasks = [(Setting(args.size, *shape), row) for shape in shapes for row in args.rows]
    try:
        for index, (setting, row) in enumerate(tasks):
            place = setting.place(row)
            bench.task(f"{setting}, {place.name}", index, len(tasks))
            try:
                if not measure(bench, report.sections[0], setting, place):
                    report.failures.append(f"{setting}, {place.name}: other losses")
            except WorkerError as error:
                report.failures.append(f"{setting}, {place.name}: {error}")
            report.write()
    finally:
        bench.close()
    print(report.text())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
