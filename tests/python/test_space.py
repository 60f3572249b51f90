"""What an engine takes of a disk: limits are hard, too little is told before the first step; so is wear."""

import gc
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import zinf
from conftest import process_io, scratch_bytes
from torch import nn
from twins import LR, assert_same_model, born, budget, plain_adamw

MIB = 1 << 20
STEPS = range(6)
FORCED = {"weights": "nvme", "states": "nvme"}


def build():
    return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])  # 1 MiB each


def loss(model, seed, rows=4):
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))
    return model(x).pow(2).mean()


def train(model, optimizer, seeds=STEPS, after_step=lambda: None):
    for seed in seeds:
        loss(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    model = build()
    train(model, plain_adamw(model))
    return model


def sums(model):
    return [parameter.detach().sum().item() for parameter in model.parameters()]


@pytest.mark.parametrize("size", ["5XB", "", "-1GB", "5G", "0", "lots"])
def test_a_limit_that_is_no_size_is_named(nvme, size):
    with pytest.raises(ValueError, match=re.escape(f"{nvme}:{size}")):
        zinf.Engine(nvme=f"{nvme}:{size}")
    with pytest.raises(ValueError, match=re.escape(f"{nvme}:{size}")):
        zinf.Engine(nvme=[nvme, f"{nvme}:{size}"])


def test_a_path_may_have_colons_and_a_rank(nvme, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    os.mkdir(f"{nvme}/a:3")
    for text in (f"{nvme}/a:{{local_rank}}", f"{nvme}/a:{{local_rank}}:200MiB", Path(f"{nvme}/a:3:1GB")):
        with zinf.Engine(nvme=text, weights="nvme", evict="always") as engine:
            born(engine)
            assert scratch_bytes(f"{nvme}/a:3") > 0
        assert os.listdir(f"{nvme}/a:3") == []
    with pytest.raises(ValueError, match="nvme path .*none.* does not exist"):
        zinf.Engine(nvme=f"{nvme}/none:1GB")


CASES = {
    "auto": {},
    "forced": FORCED,
    "evict": {**FORCED, "evict": "always"},
    "states": {"states": "nvme", "weights": "host"},
}


def refusal_of(model, update, check=lambda: None):
    """Trains, or returns what an optimizer or its first step says, which must not have changed a weight."""
    before = sums(model)
    try:
        optimizer = zinf.AdamW(model.parameters(), lr=LR, update=update)
        loss(model, 0).backward()
        optimizer.step()
    except zinf.BudgetError as error:
        assert sums(model) == before, "refused in the middle of a step"
        return str(error)
    optimizer.zero_grad()
    train(model, optimizer, STEPS[1:], check)
    return None


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("case", CASES)
def test_just_enough_works_and_less_is_refused_before_the_first_step(nvme, plain, case, update):
    options = {**CASES[case], "host_memory": budget((44 if case == "states" else 16) * MIB)}

    def attempt(limit):
        def check():
            assert scratch_bytes(nvme) <= limit

        with zinf.Engine(nvme=f"{nvme}:{limit}", **options) as engine:
            model = born(engine, build)
            refusal = refusal_of(model, update, check)
            check()
            if refusal is None:
                assert_same_model(model, plain)
                return None
        assert re.search(rf"on NVMe.*{nvme}.*its limit.*raise the limit", refusal), refusal
        number, unit = re.search(r": ([0-9.]+) (MiB|B) needed", refusal).groups()
        return int(float(number) * (MIB if unit == "MiB" else 1) * 1.01)

    named = [attempt(2 * MIB)]
    while named[-1] is not None:
        named.append(attempt(named[-1]))
    # What activations need is known when there were some, and how memory falls to pieces when some has left.
    assert 1 < len(named) <= 6, named
    if case == "auto":  # which of these are refused depends on the order in which memory was used
        for share in (0.95, 0.9, 0.8, 0.7, 0.6):
            attempt(int(named[-2] * share))
    else:
        assert attempt(int(named[-2] * 0.97)) is not None


def test_several_paths_share_what_is_needed(nvme, plain):
    for name in "ab":
        os.mkdir(f"{nvme}/{name}")
    limits = {"a": 6 * MIB, "b": 40 * MIB}
    paths = [f"{nvme}/{name}:{limit}" for name, limit in limits.items()]
    with zinf.Engine(nvme=paths, **FORCED) as engine:
        model = born(engine, build)
        train(model, zinf.AdamW(model.parameters(), lr=LR))
        sizes = {name: scratch_bytes(f"{nvme}/{name}") for name in limits}
        assert all(5 * MIB < sizes[name] <= limits[name] for name in limits), sizes
        assert_same_model(model, plain)
    with zinf.Engine(nvme=[f"{nvme}/a:6MiB", f"{nvme}/b:20MiB"], **FORCED) as engine:
        model = born(engine, build)
        with pytest.raises(zinf.BudgetError, match="/a: .*found.*/b: .*found"):
            zinf.AdamW(model.parameters(), lr=LR)


def test_nvme_that_is_missing_and_needed(nvme):
    with zinf.Engine(host_memory=budget(20 * MIB)) as engine:
        model = born(engine, build)
        with pytest.raises(zinf.BudgetError, match=r"at least 32.0 MiB.*give nvme= with at least") as error:
            zinf.AdamW(model.parameters(), lr=LR)
    del model
    named = float(re.search(r"nvme= with at least ([0-9.]+) MiB", str(error.value)).group(1))
    assert 12 < named < 20
    with zinf.Engine(host_memory=budget(20 * MIB), nvme=nvme) as engine:
        model = born(engine, build)
        train(model, zinf.AdamW(model.parameters(), lr=LR), range(2))


def test_nothing_is_taken_while_all_fits_in_memory(nvme, plain):
    with zinf.Engine(host_memory=budget(80 * MIB), nvme=f"{nvme}:1MiB") as engine:
        model = born(engine, build)
        train(model, zinf.AdamW(model.parameters(), lr=LR))
        assert scratch_bytes(nvme) == 0
        assert_same_model(model, plain)


def test_a_batch_that_would_cross_the_limit_is_refused_and_changes_nothing(nvme):
    with zinf.Engine(host_memory=budget(48 * MIB), nvme=f"{nvme}:4MiB") as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        train(model, optimizer, range(2))
        before = sums(model)
        with pytest.raises(zinf.BudgetError, match=rf"host_memory.*{nvme}.*4 MiB found \(its limit\)"):
            loss(model, 0, rows=4096).backward()  # 8 MiB for each activation
        assert scratch_bytes(nvme) <= 4 * MIB
        optimizer.zero_grad()
        assert sums(model) == before
        train(model, optimizer, range(2))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "zinf-test", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no leave to mount a file system")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_disk_that_is_too_small_is_told_before_the_first_step(small_disk, plain, update):
    with zinf.Engine(nvme=small_disk, states="nvme") as engine:
        model = born(engine, build)
        train(model, zinf.AdamW(model.parameters(), lr=LR, update=update))  # 16 MiB
        assert_same_model(model, plain)
        gc.collect()
        (small_disk / "other").write_bytes(bytes(6 * MIB))
        zinf.AdamW(model.parameters(), lr=LR, update=update)  # what the store holds is its own
    del model
    (small_disk / "other").write_bytes(bytes(10 * MIB))
    with zinf.Engine(nvme=small_disk, states="nvme") as engine:
        model = born(engine, build)
        before = sums(model)
        with pytest.raises(zinf.BudgetError, match=rf"needs 16.0 MiB on NVMe.*{small_disk}.*needed.*found"):
            zinf.AdamW(model.parameters(), lr=LR, update=update)
        assert sums(model) == before
        assert scratch_bytes(small_disk) == 0
        (small_disk / "other").unlink()
        train(model, zinf.AdamW(model.parameters(), lr=LR, update=update))
        assert_same_model(model, plain)


def test_wear_is_what_the_kernel_counts(nvme):
    with zinf.Engine(nvme=nvme, **FORCED, nvme_endurance="600TB") as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        assert engine.stats()["nvme_write_bytes_per_step"] == 0
        train(model, optimizer, range(2))
        before = process_io()[1]
        stats_before = engine.stats()
        train(model, optimizer, range(4))
        stats = engine.stats()
        written = process_io()[1] - before
        assert stats["steps"] == 6
        assert stats["bytes_written"] - stats_before["bytes_written"] == pytest.approx(written, rel=0.02)
        per_step = stats["nvme_write_bytes_per_step"]
        assert per_step == pytest.approx(written / 4, rel=0.1)
        assert per_step >= 24 * MIB - 2 * MIB  # weights and both moments, but for what stays
        assert stats["nvme_endurance_bytes"] == 600 * 10**12
        assert stats["nvme_write_tb_per_day"] > 0
        assert stats["nvme_life_per_day"] == pytest.approx(stats["nvme_write_tb_per_day"] / 600)
        assert stats["nvme_life_per_year"] == pytest.approx(365 * stats["nvme_life_per_day"])
    assert engine.stats()["steps"] == 6


def test_drives_are_rated_by_their_size(nvme):
    disk = os.statvfs(nvme)
    with zinf.Engine(nvme=nvme) as engine:
        rated = engine.stats()["nvme_endurance_bytes"]
    assert rated == pytest.approx(disk.f_blocks * disk.f_frsize * 0.3 * 365 * 5)
    with zinf.Engine() as engine:
        assert engine.stats()["nvme_endurance_bytes"] == 0
    with pytest.raises(ValueError, match="nvme_endurance"):
        zinf.Engine(nvme=nvme, nvme_endurance="many")
