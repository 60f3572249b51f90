"""DeepSpeed beside zinf, through a script that trains the same model with it (see --peers of speed.py)."""

import os
import re
import shutil
import signal
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from context import Bench, Fresh, warm
from models import SIZES
from pairs import Pairs, spread
from report import Section
from rows import moved, others
from setting import GB, PLACES, Held, Setting
from watch import Used, Watched, WorkerError

ENVIRONMENT = {"OMP_NUM_THREADS": "2", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "RANK": "0",
               "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571",
               "TOKENIZERS_PARALLELISM": "false", "MAX_JOBS": "2"}  # fmt: skip


@dataclass(frozen=True)
class Rival:
    system: str  # as the script calls it
    name: str
    place: str  # of zinf, beside it
    bytes: float  # of memory that it holds per parameter, besides activations
    targets: dict[int, float]  # of the ratio, by the tokens of a batch


RIVALS = (
    Rival("ds_none", "no offload", "ram", 18.5, {64: 0.5, 1024: 0.5}),
    Rival("ds_nvme_opt", "states on NVMe", "states", 7.5, {64: 0.4, 1024: 0.8}),
    Rival("ds_nvme_both", "weights and states on NVMe", "nothing", 6.5, {64: 0.5}),
)


class Script(Watched):
    """The script never waits: it is stopped when it has told of a step, until the next is asked for."""

    def __init__(self, command: list[str], folder: str, environment: dict[str, str] | None = None):
        self._log = os.path.join(folder, "log")
        with open(self._log, "w") as log:
            super().__init__(
                command, cwd=folder, env=environment or {**os.environ, **ENVIRONMENT}, stderr=log
            )

    def _signal(self, number: int) -> None:
        self._process.send_signal(number)

    def _built(self) -> int:
        parameters = int(self._find(r"BUILT .* params (\d+)")[1])
        self._signal(signal.SIGSTOP)
        return parameters

    def _step(self, steps: int) -> None:
        self._signal(signal.SIGCONT)
        for _ in range(steps):
            self.losses.append(float(self._find(r"step \d+ loss (\S+)")[1]))
        self._signal(signal.SIGSTOP)

    def _end(self) -> None:
        self._process.kill()

    def _find(self, pattern: str) -> re.Match:
        for line in self._process.stdout:
            if found := re.match(pattern, line):
                return found
        with open(self._log) as log:
            last = (log.read().strip() or "no output").splitlines()[-1]
        raise WorkerError(f"DeepSpeed: exit code {self._process.wait()}: {last}")


class DeepSpeed:
    def __init__(self, bench: Bench, settings: list[Setting]):
        self.bench, self.settings = bench, settings
        self.table = Section(
            "DeepSpeed",
            "zinf in fp32; DeepSpeed ZeRO-3 in bf16 with fp32 masters, GEMM and attention in fp32 on CPUs "
            "without bf16 instructions. Ratios are medians (least-most) of interleaved pairs of steps: "
            "DeepSpeed's process is stopped while zinf's trains. Peaks are anonymous and shared memory, with "
            "imports.",
            ("model, batch", "DeepSpeed with", "zinf with", "DeepSpeed s/step", "zinf s/step", "ratio",
             "target", "DeepSpeed's B per parameter and step", "peak GB (DeepSpeed's)",
             "first step s (DeepSpeed's)", "others' CPU"))  # fmt: skip

    def tasks(self):
        return [
            (f"DeepSpeed, {setting}, {rival.name}", lambda s=setting, r=rival: self.run(s, r))
            for setting in self.settings
            for rival in RIVALS
            if rival.system in self.bench.args.rivals
        ]

    def run(self, setting: Setting, rival: Rival) -> bool:
        bench = self.bench
        need = bench.need(setting.unclipped())
        bench.end_plain()
        place = setting.place(rival.place)
        folder = tempfile.mkdtemp(prefix="deepspeed-", dir=bench.nvme)
        sides: list[Callable[[], Watched]] = [
            lambda: warm(Script(self._command(setting, rival.system, folder), folder)),
            lambda: bench.zinf(setting, *place.arguments(need, bench.nvme)),
        ]
        bench.say("DeepSpeed starts")
        try:
            held = int(rival.bytes * need.parameters)
            both = Held(held + need.activations, held), place.held(need)
            turns = not bench.fit(*both)
            if not bench.fit_in_turns(*both):
                bench.say("the two have no room side by side: each starts anew for every pair")
                sides = [lambda start=start: Fresh(need.parameters, start) for start in sides]
            with sides[0]() as deepspeed, sides[1]() as zinf:
                if turns and isinstance(zinf, Watched):
                    zinf.keep_small()
                pairs = bench.interleave(deepspeed.train, zinf.train)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._add(setting, rival, pairs, deepspeed, zinf)
        return True

    def _add(self, setting: Setting, rival: Rival, pairs: Pairs, deepspeed: Watched, zinf: Watched) -> None:
        target = rival.targets.get(setting.batch * setting.tokens)
        verdict = "none"
        if target is not None:
            verdict = f"{target:.2f} {'reached' if pairs.ratio() <= target else 'missed'}"
        times = [statistics.median(map(Used.step, side)) for side in (pairs.reference, pairs.candidate)]
        self.table.rows.append([
            str(setting), rival.name, PLACES[rival.place].name, f"{times[0]:.2f}", f"{times[1]:.2f}",
            spread(pairs.ratios(), 3), verdict, moved(pairs.reference, zinf.parameters),
            f"{zinf.peak_bytes() / GB:.2f} ({deepspeed.peak_bytes() / GB:.2f})",
            f"{zinf.first_seconds:.1f} ({deepspeed.first_seconds:.1f})", others(pairs)])  # fmt: skip
        self.bench.say(f"ratio {spread(pairs.ratios())}")

    def _command(self, setting: Setting, system: str, folder: str) -> list[str]:
        args, model = self.bench.args, SIZES[setting.size]
        command = [args.deepspeed_python, os.path.abspath(args.peers), "--system", system, "--swap", folder,
                   "--batch", setting.batch, "--seq", setting.tokens, "--steps", 10**6, "--warmup", 2,
                   "--embd", model.width, "--layers", model.layers, "--heads", model.heads,
                   "--vocab", model.vocabulary, "--clip", 1.0 if setting.clip else 0.0,
                   "--par_buffer_size", max(34e6, 1.01 * model.vocabulary * model.width)]  # fmt: skip
        return list(map(str, command))
