"""Budgets from too little to everything: each is refused or kept, with the weights of plain PyTorch.

    python bench/e2e/budget_sweep.py --nvme DIRECTORY [--size 124M] [--budgets 40] [--out REPORT.md]

Every budget trains HF's GPT-2 in a process of its own, clipping on, update modes in turn. Its peak of
anonymous and shared memory must be at most the budget + 5 % + what the plain run holds outside of torch's
tensors. The least budget that engine.probe() names is compared with the least that really works.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile

from watch import MIB, run

COMMON = ("--clip", 1.0, "--steps")


class Sweep:
    def __init__(self, args: argparse.Namespace):
        self.size = args.size
        self.steps = args.steps
        self.nvme = tempfile.mkdtemp(prefix="zinf-sweep-", dir=args.nvme)
        self.rows: list[dict] = []
        self.bad: list[str] = []
        plain = run("--size", self.size, "--plain", *COMMON, self.steps)
        if "error" in plain:
            sys.exit(f"the plain run failed: {plain['message']}")
        self.hash, self.outside, self.plain_peak = plain["hash"], plain["left"], plain["peak"]
        self.parameters = plain["parameters"]

    def probe(self, update: str) -> int:
        everything = 24 * self.parameters + (1 << 30)
        result = self.train(everything, update, "--probe")
        if "least" not in result:
            sys.exit(f"the probe failed: {result['message']}")
        return result["least"]

    def train(self, budget: int, update: str, *more: str) -> dict:
        return run("--size", self.size, "--host-memory", budget, "--nvme", self.nvme, "--update", update,
                   *more, *COMMON, self.steps)  # fmt: skip

    def try_budget(self, budget: int, update: str) -> bool:
        """Whether it was kept."""
        result = {"losses": [], **self.train(budget, update)}
        allowed = budget + budget // 20 + self.outside
        verdict = "kept"
        if result.get("error") == "BudgetError" and not result["losses"]:
            verdict = "refused in the first step" if "built" in result else "refused before the first step"
        elif "error" in result:
            verdict = f"FAILED after {len(result['losses'])} steps: {result['message']}"
        elif result["hash"] != self.hash:
            verdict = "OTHER WEIGHTS"
        if result["peak"] > allowed:
            verdict += ", OVER"
        if any(word in verdict for word in ("FAILED", "OTHER", "OVER")):
            self.bad.append(f"{budget} bytes, {update}: {verdict}")
        seconds = sorted(result.get("seconds", []))
        row = {"budget": budget, "update": update, "verdict": verdict, "peak": result["peak"],
               "allowed": allowed, "step": seconds[len(seconds) // 2] if seconds else None}  # fmt: skip
        self.rows.append(row)
        print(_line(row), flush=True)
        return verdict == "kept"

    def least(self, named: int, update: str) -> int:
        """The least that works, in steps of 2 % of what was named."""
        best = 0
        for percent in range(104, 70, -2):
            if not self.try_budget(named * percent // 100, update):
                break
            best = named * percent // 100
        return best


def _line(row: dict) -> str:
    step = "" if row["step"] is None else f"{row['step']:.1f} s"
    return (
        f"| {row['budget'] / MIB:.0f} | {row['update']} | {row['verdict']} | {row['peak'] / MIB:.0f} "
        f"| {row['allowed'] / MIB:.0f} | {step} |"
    )


HEADER = "| budget MiB | update | | peak MiB | allowed MiB | step |\n|---|---|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--size", default="124M")
    parser.add_argument("--budgets", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", help="a file for the report")
    args = parser.parse_args()
    sweep = Sweep(args)
    lines = [f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; GPT-2 of "
             f"{sweep.parameters / 1e6:.0f} M parameters, 1 x 64 tokens, clipping on, {args.steps} steps.",
             f"Plain PyTorch: peak {sweep.plain_peak / MIB:.0f} MiB, of it {sweep.outside / MIB:.0f} MiB "
             "outside of its tensors."]  # fmt: skip
    print("\n".join(lines), flush=True)
    named = {update: sweep.probe(update) for update in ("step", "backward")}
    print(HEADER)
    for update, bytes_named in named.items():
        real = sweep.least(bytes_named, update)
        ratio = bytes_named / real if real else float("nan")
        lines.append(f'update="{update}": the probe names {bytes_named / MIB:.0f} MiB, the least that works '
                     f"is {real / MIB:.0f} MiB: {ratio:.2f} of it.")  # fmt: skip
        print(lines[-1], flush=True)
        if not 0.9 <= ratio <= 1.1:
            sweep.bad.append(lines[-1])
    low, high = min(named.values()) // 2, 20 * sweep.parameters
    for index in range(args.budgets):
        budget = int(low * (high / low) ** (index / max(1, args.budgets - 1)))
        sweep.try_budget(budget, ("step", "backward")[index % 2])

    lines += ["", HEADER, *map(_line, sorted(sweep.rows, key=lambda row: row["budget"])), ""]
    lines.append("\n".join(sweep.bad) if sweep.bad else "Every budget was refused or kept.")
    print(lines[-1])
    if args.out:
        with open(args.out, "w") as file:
            file.write("\n".join(lines) + "\n")
    shutil.rmtree(sweep.nvme, ignore_errors=True)  # of a worker that was killed
    return 1 if sweep.bad else 0


if __name__ == "__main__":
    sys.exit(main())
