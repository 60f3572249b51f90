"""The further tables of the speed benchmark: budgets, what each part gives, sizes, first steps."""

import os
import statistics
from itertools import pairwise

from context import Bench
from pairs import spread
from report import Section, memory_bytes, plot
from rows import moved
from setting import GB, PLACES, Setting
from watch import Used, Worker

NOTHING = PLACES["nothing"]


class Sweep:
    """Step times from the least budget to everything."""

    def __init__(self, bench: Bench, setting: Setting):
        self.bench, self.setting = bench, setting
        self.table = Section(
            f"Budgets ({setting})",
            'From what `engine.probe` names to everything, `update="backward"`; each budget in a fresh '
            "process, steps one by one: median (least-most). Not interleaved: trust the curve, not a point.",
            ("host_memory GB", "s/step", "B per parameter and step", "peak GB"),
        )

    def run(self) -> bool:
        need = self.bench.need(self.setting)
        most = 13 * need.parameters + need.room()
        points = []
        count = self.bench.args.budgets
        for index in range(count):
            budget = int(1.02 * need.least * (most / need.least) ** (index / max(1, count - 1)))
            self.bench.say(f"budget {index + 1} of {count}: {budget / GB:.2f} GB")
            points.append((budget / GB, self._measure(budget)))
        if self.bench.fit(need.plain()):
            self._plain()
        steps = [after / before for (_, before), (_, after) in pairwise(points)]
        if steps:
            self.table.after.append(
                f"The worst step of the curve: {max(steps):.2f} of the time with less memory."
            )
        path = os.path.splitext(self.bench.args.out or "speed.md")[0] + "_budgets.svg"
        self.table.after.append(plot(points, ("GB", "s/step"), path))
        return True

    def _measure(self, budget: int) -> float:
        arguments = ("--host-memory", budget, "--update", "backward", "--nvme", self.bench.nvme)
        with self.bench.zinf(self.setting, *arguments) as zinf:
            results = self.bench.single_steps(zinf)
            times = [used.step() for used in results]
            self.table.rows.append([f"{budget / GB:.2f}", spread(times),
                                    moved(results, zinf.parameters),
                                    f"{zinf.peak_bytes() / GB:.2f}"])  # fmt: skip
        return statistics.median(times)

    def _plain(self) -> None:
        plain = self.bench.plain(self.setting)
        times = [used.step() for used in self.bench.single_steps(plain)]
        self.table.rows.append(["plain PyTorch", spread(times), "", f"{plain.peak_bytes() / GB:.2f}"])


class WhatIf:
    """What a part gives: the time without it over the time with it."""

    def __init__(self, bench: Bench, setting: Setting):
        self.bench, self.setting = bench, setting
        self.table = Section(
            f"What each part gives ({setting})",
            "Time without it over time with it, both zinf with the same host_memory: medians (least-most) of "
            'interleaved pairs. With `update="step"` gradients are written and read too: they do not fit in '
            "memory.",
            ("part", "place", "s/step with", "without", "ratio", "B per parameter and step with", "without"),
        )

    def tasks(self):
        variants = [
            ("prefetch", (), {"ZINF_PREFETCH": "0"}),
            ('update="backward", not "step"', ("--update", "step"), {}),
        ]
        if self.setting.bf16:
            variants = [('master="split", not "plain"', ("--master", "plain"), {})]
        return [
            (f"what it gives: {variant[0]}; {key}", lambda key=key, variant=variant: self.run(key, *variant))
            for key in ("states", "nothing")
            for variant in variants
        ]

    def run(self, key: str, name: str, arguments: tuple, environment: dict[str, str]) -> bool:
        bench, place = self.bench, self.setting.place(key)
        need = bench.need(self.setting)
        common = place.arguments(need, bench.nvme)
        bench.end_plain()
        with (bench.zinf(self.setting, *common) as usual,
              bench.zinf(self.setting, *common, *arguments, **environment) as without):  # fmt: skip
            pairs = bench.interleave(usual.train, without.train)
        sides = (pairs.reference, pairs.candidate)
        times = [statistics.median(map(Used.step, side)) for side in sides]
        bytes_moved = [moved(side, need.parameters, place) for side in sides]
        self.table.rows.append([name, place.name, f"{times[0]:.2f}", f"{times[1]:.2f}",
                                spread(pairs.ratios(), 3), *bytes_moved])  # fmt: skip
        return usual.losses[: len(without.losses)] == without.losses[: len(usual.losses)]


class Sizes:
    """Time per parameter with nothing resident."""

    def __init__(self, bench: Bench, batch: int, tokens: int):
        self.bench, self.batch, self.tokens = bench, batch, tokens
        self.table = Section(
            f"Sizes, nothing resident ({batch} x {tokens})",
            'Forced: `weights="nvme"`, `states="nvme"`. Steps one by one: median (least-most).',
            ("size", "parameters", "host_memory GB", "s/step", "ns per parameter and step",
             "B per parameter and step (of the bound)", "peak GB"))  # fmt: skip

    def tasks(self):
        return [
            (f"size {size}", lambda size=size: self.run(Setting(size, self.batch, self.tokens)))
            for size in self.bench.args.sizes.split(",")
        ]

    def run(self, setting: Setting) -> bool:
        bench = self.bench
        bench.end_plain()
        need = bench.need(setting)
        if need.room() > memory_bytes("MemAvailable"):
            self.table.rows.append(
                [setting.size, f"{need.parameters / 1e6:.0f} M", "too little memory"] + [""] * 4
            )
            return True
        with bench.zinf(setting, *NOTHING.arguments(need, bench.nvme), "--away") as zinf:
            results = bench.single_steps(zinf)
            times = [used.step() for used in results]
            self.table.rows.append([
                setting.size, f"{need.parameters / 1e6:.0f} M", f"{NOTHING.budget(need) / GB:.2f}",
                spread(times), spread([1e9 * time / need.parameters for time in times]),
                moved(results, need.parameters, NOTHING), f"{zinf.peak_bytes() / GB:.2f}"])  # fmt: skip
        return True


class FirstSteps:
    """From the start of a process to the end of its first step, beside plain PyTorch."""

    def __init__(self, bench: Bench, settings: list[Setting]):
        self.bench, self.settings = bench, [setting for setting in settings if not setting.clip]
        self.table = Section(
            "First steps",
            "From the start of the process, with its imports and the building of the model, to the end of "
            "its first step and of what it writes. Medians (least-most) of interleaved pairs of fresh "
            "processes.",
            ("model, batch", "place", "plain s", "zinf s", "ratio"))  # fmt: skip

    def tasks(self):
        return [(f"first steps, {setting}", lambda s=setting: self.run(s)) for setting in self.settings]

    def run(self, setting: Setting) -> bool:
        bench, place = self.bench, setting.place("states")
        arguments = place.arguments(bench.need(setting), bench.nvme)
        bench.end_plain()
        plain, zinf = [], []
        for index in range(bench.args.pairs):
            bench.say(f"pair {index + 1} of {bench.args.pairs}")
            plain.append(_first_step("--plain", *setting.arguments()))
            zinf.append(_first_step(*setting.arguments(), *arguments))
        ratios = [b / a for a, b in zip(plain, zinf, strict=True)]
        self.table.rows.append(
            [str(setting), place.name, spread(plain, 1), spread(zinf, 1), spread(ratios, 3)]
        )
        return True


def _first_step(*arguments: object) -> float:
    with Worker(*arguments) as worker:
        return worker.first_seconds
