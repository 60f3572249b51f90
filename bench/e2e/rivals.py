"""DeepSpeed beside zinf, through a script that trains the same model with it (see --peers of speed.py)."""

import json
import os
import shutil
import subprocess
import tempfile

from context import Bench
from models import SIZES
from report import Section
from setting import Setting
from watch import WorkerError

SYSTEMS = {
    "ds_cpu": "weights and states in RAM",
    "ds_nvme_opt": "weights in RAM, states on NVMe",
    "ds_nvme_both": "weights and states on NVMe",
}
ENVIRONMENT = {"OMP_NUM_THREADS": "2", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "RANK": "0",
               "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571",
               "TOKENIZERS_PARALLELISM": "false", "MAX_JOBS": "2"}  # fmt: skip


class DeepSpeed:
    def __init__(self, bench: Bench, settings: list[Setting]):
        self.bench, self.settings = bench, settings
        self.table = Section(
            "DeepSpeed",
            "ZeRO-3 in bf16 with fp32 masters, GEMM and attention in fp32 on CPUs without bf16 instructions; "
            "each row in a fresh process, steps one by one: median (least-most). Memory is the peak besides "
            "imports.",
            ("model, batch", "place", "s/step", "forward / backward / step s",
             "B per parameter and step, read + written", "memory GB", "first step s"))  # fmt: skip

    def tasks(self):
        return [
            (f"DeepSpeed, {setting}, {SYSTEMS[system]}", lambda s=setting, name=system: self.run(s, name))
            for setting in self.settings
            for system in SYSTEMS
        ]

    def run(self, setting: Setting, system: str) -> bool:
        self.bench.end_plain()
        folder = tempfile.mkdtemp(prefix="deepspeed-", dir=self.bench.nvme)
        try:
            result = self._train(setting, system, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        times = sorted(result["all_s"][2:])
        self.table.rows.append([
            str(setting), SYSTEMS[system], f"{result['s_step']:.2f} ({times[0]:.2f}-{times[-1]:.2f})",
            f"{result['fwd']:.2f} / {result['bwd']:.2f} / {result['opt']:.2f}",
            f"{result['rd_Bpp']:.1f} + {result['wr_Bpp']:.1f}", f"{result['net_peak_gb']:.2f}",
            f"{result['t_first']:.1f}"])  # fmt: skip
        return True

    def _train(self, setting: Setting, system: str, folder: str) -> dict:
        args, model = self.bench.args, SIZES[setting.size]
        command = [args.deepspeed_python, os.path.abspath(args.peers), "--system", system, "--swap", folder,
                   "--batch", setting.batch, "--seq", setting.tokens, "--steps", 2 + args.pairs,
                   "--warmup", 2, "--embd", model.width, "--layers", model.layers, "--heads", model.heads,
                   "--vocab", model.vocabulary, "--clip", 1.0 if setting.clip else 0.0,
                   "--par_buffer_size", max(34e6, 1.01 * model.vocabulary * model.width)]  # fmt: skip
        run = subprocess.run(list(map(str, command)), cwd=folder, env={**os.environ, **ENVIRONMENT},
                             capture_output=True, text=True)  # fmt: skip
        results = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
        if not results:
            lines = (run.stderr.strip() or run.stdout.strip() or "no output").splitlines()
            raise WorkerError(f"DeepSpeed: exit code {run.returncode}: {lines[-1]}")
        return json.loads(results[-1].removeprefix("RESULT "))
