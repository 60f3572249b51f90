"""host_memory is a hard limit, and one that cannot work is refused before the first step."""

import os
import re

import pytest
import torch
import zinf
from conftest import scratch_bytes
from torch import nn
from twins import LR, assert_same_model, born, budget, plain_adamw

MIB = 1 << 20


def build():
    return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])  # 1 MiB each


def loss(model, seed, rows=4):
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))
    return model(x).pow(2).mean()


# What an operator that does not fit says: of later ones nothing is known.
UP_TO_HERE = (
    r'budget "host_memory" of .* needs at least (\d+) bytes .*\. That is up to here: '
    r"engine\.probe\(step\) names the least for the whole step\. Raise host_memory, .*smaller, or use "
    r"gradient checkpointing"
)


def least_named(error):
    return float(re.search(r"raise it to ([0-9.]+) MiB", str(error.value)).group(1)) * MIB


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_budget_that_cannot_work_is_refused_with_the_least_that_would(nvme, update):
    with zinf.Engine(host_memory=budget(3 * MIB), nvme=nvme) as engine:
        model = born(engine, build)
        with pytest.raises(zinf.BudgetError, match="at least 4.0 MiB for one update") as error:
            zinf.AdamW(model.parameters(), lr=LR, update=update)
    del model
    least = int(least_named(error)) + 8 * MIB  # what forward and backward need, 2 MiB at a time
    with zinf.Engine(host_memory=least, nvme=nvme) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR, update=update)
        for seed in range(2):
            loss(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = engine.stats()
        assert stats["host_used_bytes"] <= stats["host_limit_bytes"]


def test_without_nvme_everything_must_fit():
    with zinf.Engine(host_memory=budget(16 * MIB)) as engine:
        model = born(engine, build)
        with pytest.raises(zinf.BudgetError, match=r"at least 32.0 MiB.*give nvme="):
            zinf.AdamW(model.parameters(), lr=LR)


def test_what_does_not_fit_is_named(nvme):
    with zinf.Engine(host_memory=budget(6 * MIB), nvme=nvme) as engine:
        model = born(engine, build)
        held = torch.empty(3 * MIB, dtype=torch.uint8)
        text = r"^\w+\.weight/weight: nothing more.*unit wants.*Raise host_memory, give nvme="
        with pytest.raises(zinf.BudgetError, match=text):
            _pinned = [parameter.detach().numpy() for parameter in model.parameters()]
        del held


def test_an_operator_that_crosses_the_budget_raises_and_changes_nothing(nvme):
    with zinf.Engine(host_memory=budget(24 * MIB), nvme=nvme) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        before = [parameter.detach().sum().item() for parameter in model.parameters()]
        with pytest.raises(zinf.BudgetError, match=UP_TO_HERE) as error:
            loss(model, 0, rows=16384).backward()  # 32 MiB for each activation
        assert int(re.search(UP_TO_HERE, str(error.value))[1]) >= 32 * MIB
        assert [parameter.detach().sum().item() for parameter in model.parameters()] == before
        optimizer.zero_grad()
        loss(model, 0).backward()  # a smaller batch goes on
        optimizer.step()


def trained_plain():
    torch.manual_seed(0)
    model = build()
    optimizer = plain_adamw(model)
    for seed in range(4):
        loss(model, seed).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("extra", [12, 20, 40, 80])
def test_any_budget_gives_the_same_bits(nvme, extra, update):
    plain = trained_plain()
    with zinf.Engine(host_memory=budget(extra * MIB), nvme=nvme) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR, update=update, max_grad_norm=0.1)
        for seed in range(4):
            loss(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = engine.stats()
        assert stats["host_used_bytes"] <= stats["host_limit_bytes"]
        assert (stats["bytes_read"] == 0) == (extra >= 40), "with room for all nothing moves"
        assert_same_model(model, plain)


def test_the_local_rank_is_put_into_paths(nvme, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    os.mkdir(f"{nvme}/3")
    with zinf.Engine(nvme=f"{nvme}/{{local_rank}}", weights="nvme", evict="always") as engine:
        born(engine, build)(torch.ones(1, 512))
        assert scratch_bytes(f"{nvme}/3") > 0


def test_what_is_omitted_follows_from_the_machine():
    with zinf.Engine() as engine:
        limit = engine.stats()["host_limit_bytes"]
    available = int(re.search(r"MemAvailable:\s+(\d+)", open("/proc/meminfo").read()).group(1)) * 1024
    assert limit <= available
