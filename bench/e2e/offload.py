"""What the slow tiers have to do for each of several ranks whose models are on devices.

    python bench/e2e/offload.py --nvme DIRECTORY [--ranks 1,2,4] [--out bench/reports]

Every rank is a process with an emulated device of its own, states on NVMe, updates on the host.
Counts, not times: bytes from /proc/self/io, CPU seconds of the updates.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

import torch
from report import Report, Section, report_path

WIDTH, LAYERS, BATCH, STEPS = 1024, 12, 16, 3
PARAMETERS = LAYERS * WIDTH * WIDTH


def io_bytes() -> tuple[int, int]:
    with open("/proc/self/io") as file:
        fields = dict(line.split(": ") for line in file)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def work(nvme: str) -> None:
    import torch.distributed as dist
    import zinf
    from torch import nn
    from zinf import emulated

    torch.set_num_threads(1)
    emulated.enable(memory_bytes=512 << 20)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with zinf.Engine(nvme=nvme, states="nvme") as engine:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = engine.adopt(nn.Sequential(*layers).to("emu"))
        del layers
        optimizer = zinf.AdamW(model.parameters(), lr=1e-6, update="backward")
        x = torch.randn(BATCH, WIDTH).to("emu")

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def steps(count: int) -> None:
            for _ in range(count):
                step()
            torch.accelerator.synchronize()
            while engine.stats()["updates_waiting"]:
                time.sleep(1e-3)

        steps(2)
        before, stats = io_bytes(), engine.stats()
        steps(STEPS)
        after, then = io_bytes(), engine.stats()
        result = {
            "read": (after[0] - before[0]) / STEPS,
            "written": (after[1] - before[1]) / STEPS,
            "updated": (then["updated_parameters"] - stats["updated_parameters"]) / STEPS,
            "cpu": (then["update_cpu_seconds"] - stats["update_cpu_seconds"]) / STEPS,
        }
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def run(ranks: int, nvme: str) -> list[dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks),
              "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, os.path.abspath(__file__), "--nvme", nvme, "--work"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                         env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"a rank of {ranks} has failed")
    return [json.loads(text.splitlines()[-1]) for text in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    options = parser.parse_args()
    if options.work:
        return work(options.nvme)
    options.out = report_path(options.out, "offload")
    report = Report("Slow tiers of ranks with devices", options.out)
    section = Section(
        f"{PARAMETERS / 1e6:.1f} M parameters in float32, states on NVMe",
        f"Of the rank that has most, per step; batch {BATCH} on every rank, {STEPS} steps after two. "
        "Gradients cross the link to the host whole on every rank: the group (gloo) is the host's.",
        [
            "ranks",
            "NVMe read MB",
            "NVMe written MB",
            "of one rank's",
            "parameters updated",
            "CPU of updates s",
        ],
    )
    report.sections.append(section)
    first = None
    for ranks in options.ranks:
        print(f"{ranks} ranks", flush=True)
        results = run(ranks, options.nvme)
        most = {name: max(result[name] for result in results) for name in results[0]}
        moved = most["read"] + most["written"]
        first = first or moved
        numbers = [f"{most['read'] / 1e6:.1f}", f"{most['written'] / 1e6:.1f}", f"{moved / first:.3f}"]
        numbers += [f"{most['updated'] / 1e6:.2f} M", f"{most['cpu']:.3f}"]
        section.rows.append([str(ranks), *numbers])
        report.write()
    print(report.text())


if __name__ == "__main__":
    main()
