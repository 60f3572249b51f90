"""How fast zinf trains, beside plain PyTorch and the disk, and beside DeepSpeed.

    python bench/e2e/speed.py --nvme DIRECTORY [--rows ram,states,nothing] [--out bench/reports]

Needs fio, a quiet machine, and for 640 M parameters 24 GB of memory and 20 GB on the disk; --rows all takes
hours. For a try of a minute: --size 2M --pairs 1, which has one batch, unclipped.
"""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable

import rows
from context import Bench
from models import OTHERS, SIZES
from report import Report, report_path
from rivals import RIVALS, DeepSpeed
from setting import Setting
from tables import FirstSteps, Sizes, Sweep, WhatIf
from watch import WorkerError

PLACES = ("ram", "states", "nothing")
ROWS = (*PLACES, "deepspeed", "sweep", "what-if", "sizes", "models", "first")
SYSTEMS = tuple(rival.system for rival in RIVALS)
TRIAL = "2M"  # the size for trying
Task = tuple[str, Callable[[], bool]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", required=True, help="a directory on the disk to use")
    parser.add_argument("--rows", default="ram,states,nothing,deepspeed", help=f"all, or any of {ROWS}")
    parser.add_argument("--size", choices=SIZES, default="640M")
    parser.add_argument("--tokens", help="batches, as rows x tokens (default: 1x64,4x256)")
    parser.add_argument("--clip", choices=("off", "on", "both"), help="gradients (default: both)")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, help="of a side of a pair; by default those of --seconds")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--budgets", type=int, default=9, help="of the sweep")
    parser.add_argument("--sizes", default="124M,640M,1.3B,2.6B", help="of the table of sizes")
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="weights in bfloat16, for CPUs that have it: the main table and what-if",
    )
    parser.add_argument("--rivals", help=f"of --rows deepspeed, any of {','.join(SYSTEMS)} (default: all)")
    parser.add_argument("--deepspeed-python", metavar="PYTHON",
                        default=os.environ.get("ZINF_DEEPSPEED_PYTHON"),
                        help="one that has DeepSpeed (default: $ZINF_DEEPSPEED_PYTHON)")  # fmt: skip
    parser.add_argument("--peers", metavar="SCRIPT", default=os.environ.get("ZINF_PEERS"),
                        help="which trains with DeepSpeed (default: $ZINF_PEERS)")  # fmt: skip
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    args = parser.parse_args()
    args.rows = list(ROWS) if args.rows == "all" else args.rows.split(",")
    args.tokens = args.tokens or ("1x64" if args.size == TRIAL else "1x64,4x256")
    args.clip = args.clip or ("off" if args.size == TRIAL else "both")
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    args.rivals = args.rivals.split(",") if args.rivals else list(SYSTEMS)
    if unknown := set(args.rivals) - set(SYSTEMS):
        parser.error(f"--rivals: there is no {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    args.out = report_path(args.out, "speed")
    return args


def settings(args: argparse.Namespace, size: str) -> list[Setting]:
    clips = {"off": [False], "on": [True], "both": [False, True]}[args.clip]
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.tokens.split(",")]
    return [Setting(size, *shape, clip, args.bf16) for shape in shapes for clip in clips]


def plan(bench: Bench, report: Report) -> list[Task]:
    """Adds the sections and returns what fills them."""
    args = bench.args
    all_settings = settings(args, args.size)
    first = Setting(args.size, all_settings[0].batch, all_settings[0].tokens)
    tasks: list[Task] = []
    places = [place for place in PLACES if place in args.rows]
    if places:
        report.sections.append(rows.section("Beside plain PyTorch and the disk"))
        tasks += rows.tasks(bench, report.sections[-1], all_settings, places)
    if "deepspeed" in args.rows:
        if args.deepspeed_python and args.peers:
            deepspeed = DeepSpeed(bench, all_settings)
            report.sections.append(deepspeed.table)
            tasks += deepspeed.tasks()
        else:
            report.remarks.append("Without DeepSpeed: --deepspeed-python and --peers were not given.")
    if "sweep" in args.rows:
        sweep = Sweep(bench, first)
        report.sections.append(sweep.table)
        tasks.append(("budgets", sweep.run))
    if "what-if" in args.rows:
        what_if = WhatIf(bench, Setting(args.size, first.batch, first.tokens, bf16=args.bf16))
        report.sections.append(what_if.table)
        tasks += what_if.tasks()
    if "sizes" in args.rows:
        sizes = Sizes(bench, first.batch, first.tokens)
        report.sections.append(sizes.table)
        tasks += sizes.tasks()
    if "models" in args.rows:
        report.sections.append(rows.section("Other models"))
        others = [Setting(name, first.batch, first.tokens) for name in OTHERS]
        tasks += rows.tasks(bench, report.sections[-1], others, ["states", "nothing"])
    if "first" in args.rows:
        first_steps = FirstSteps(bench, all_settings)
        report.sections.append(first_steps.table)
        tasks += first_steps.tasks()
    return tasks


def perform(bench: Bench, report: Report, tasks: list[Task]) -> bool:
    """Whether all went well."""
    for index, (name, run) in enumerate(tasks):
        bench.task(name, index, len(tasks))
        try:
            if not run():
                report.failures.append(f"{name}: other losses")
        except WorkerError as error:
            bench.end_plain()
            report.failures.append(f"{name}: {error}")
            bench.say(f"failed: {error}")
        report.write()
    return not report.failures


def main() -> int:
    args = arguments()
    if not shutil.which("fio") and {"states", "nothing", "models"} & set(args.rows):
        sys.exit("fio is missing, which moves the reference's bytes: install it, or leave out those --rows")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the disk is tidied up
    report = Report("Speed", args.out)
    bench = Bench(args)
    try:
        good = perform(bench, report, plan(bench, report))
    finally:
        bench.close()
    print(report.text())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
