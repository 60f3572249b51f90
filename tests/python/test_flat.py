"""Hundreds of steps with sequences of many lengths: memory, files and threads stay as they are."""

import gc
import os

import pytest
import torch
import zinf
from models import CASES, VOCAB
from training import build
from twins import budget

MIB = 1 << 20
STEPS = 500
SETTLED = 100  # by then everything has been made once


def usage(engine, nvme):
    gc.collect()
    zinf._C.trim_host_memory()
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    files = [os.path.join(folder, name) for folder, _, names in os.walk(nvme) for name in names]
    stats = engine.stats()
    return {
        "memory": int(fields["RssAnon"].split()[0]) * 1024,
        "budgeted": stats["host_used_bytes"],
        "threads": int(fields["Threads"]),
        "files": len(files),
        "disk": sum(os.stat(file).st_blocks * 512 for file in files),
        "units": stats["managed"],
    }


@pytest.mark.parametrize("update", [pytest.param("step", marks=pytest.mark.full), "backward"])
def test_nothing_grows(nvme, update):
    with zinf.Engine(host_memory=budget(24 * MIB), nvme=nvme, weights="nvme", states="nvme") as engine:
        with engine.init():
            model = build(CASES["gpt2"])
        optimizer = zinf.AdamW(model.parameters(), lr=1e-4, update=update)
        generator = torch.Generator().manual_seed(0)
        seen = {}
        for step in range(STEPS):
            rows = int(torch.randint(1, 5, (1,), generator=generator))
            length = int(torch.randint(2, 33, (1,), generator=generator))
            tokens = torch.randint(VOCAB, (rows, length), generator=generator)
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 in (SETTLED, STEPS):
                seen[step + 1] = usage(engine, nvme)
        stats = engine.stats()
        assert stats["host_peak_bytes"] > 0 and stats["host_used_bytes"] <= stats["host_limit_bytes"]
    first, last = seen[SETTLED], seen[STEPS]
    assert last["memory"] <= first["memory"] + 4 * MIB
    assert last["budgeted"] <= first["budgeted"] + 4 * MIB
    for what in ("threads", "files", "disk", "units"):
        assert last[what] == first[what], f"{what} from {first[what]} to {last[what]}"
