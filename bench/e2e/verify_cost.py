"""What it costs to verify what comes back from NVMe: steps with and without, in turns, in one process.

    python bench/e2e/verify_cost.py --nvme DIRECTORY [--size 640M] [--batch 1] [--tokens 64] [--pairs 7]

Nothing is resident. After each switch one step is not timed: it reads what was written before the switch.
Prints a line of JSON: the ratios of the pairs, their median, least and most; per step and side the seconds,
the CPU seconds of the process, the bytes read, written and hashed, and the CPU seconds of hashing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import worker
from models import SIZES
from setting import PLACES, Setting, measure_need
from zinf import _C

SIDES = ("never", "always")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", required=True, help="a directory on the disk to use")
    parser.add_argument("--size", choices=SIZES, default="640M")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="of a side of a pair")
    return parser.parse_args()


def make_trainer(args: argparse.Namespace) -> worker.Trainer:
    setting = Setting(args.size, args.batch, args.tokens)
    place = PLACES["nothing"]
    options = [*setting.arguments(), *place.arguments(measure_need(setting, args.nvme), args.nvme)]
    sys.argv[1:] = [str(option) for option in options]
    trainer = worker.Trainer(worker.arguments())
    for _ in range(3):  # the order of uses is known then, and a plan made
        trainer.step()
    return trainer


def usage(trainer: worker.Trainer) -> dict[str, float]:
    stats = trainer.engine.stats()
    return {
        "seconds": time.perf_counter(),
        "cpu_seconds": time.process_time(),
        "bytes_read": stats["bytes_read"],
        "bytes_written": stats["bytes_written"],
        "checksum_bytes": stats["nvme_checksum_bytes"],
        "checksum_cpu_seconds": stats["nvme_checksum_cpu_seconds"],
    }


def side(trainer: worker.Trainer, verify: str, steps: int) -> dict[str, float]:
    """What a step takes."""
    _C._set_verify(trainer.engine._manager, verify)
    trainer.step()
    before = usage(trainer)
    for _ in range(steps):
        trainer.step()
    after = usage(trainer)
    return {key: (after[key] - before[key]) / steps for key in before}


def medians(sides: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(each[key] for each in sides), 4) for key in sides[0]}


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict:
    trainer = make_trainer(args)
    pairs: list[dict[str, dict[str, float]]] = []
    for index in range(args.pairs):
        order = SIDES if index % 2 == 0 else SIDES[::-1]
        pairs.append({verify: side(trainer, verify, args.steps) for verify in order})
        seconds = {verify: round(pairs[-1][verify]["seconds"], 3) for verify in SIDES}
        say(f"pair {index + 1}: {seconds}")
    ratios = [pair["always"]["seconds"] / pair["never"]["seconds"] for pair in pairs]
    cpu = [pair["always"]["cpu_seconds"] / pair["never"]["cpu_seconds"] for pair in pairs]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "least": round(min(ratios), 4),
        "most": round(max(ratios), 4),
        "cpu_ratio": round(statistics.median(cpu), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        **{verify: medians([pair[verify] for pair in pairs]) for verify in SIDES},
    }


def main() -> None:
    args = arguments()
    torch.set_num_threads(2)
    print(json.dumps(measure(args, lambda text: print(text, file=sys.stderr, flush=True))))


if __name__ == "__main__":
    main()
