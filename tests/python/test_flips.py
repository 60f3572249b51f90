"""Bits that flip in files while they are in use: an error that says where, or the right weights."""

import json
import os
import random
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import zinf
from flips import data_ranges, flip, flip_open_files
from ranks import run_ranks
from test_faults import LAST, SAVED, attempt, every_number, faults, started  # noqa: F401  a fixture
from test_rank_use import START
from torch import nn
from training import outcome
from twins import LR, budget

WIDTH, LAYERS = 384, 5
MOMENTS = 4  # of a step: before it, inside forward, inside backward, before step()
# Unit, block, file and offset.
CORRUPT = r"\d\.weight/\w+: .*the checksum of \S+, block \d+, \S+ at offset \d+: wanted \w{16}, got \w{16}"

PLACEMENTS = {
    "evict": {"weights": "nvme", "states": "nvme", "evict": "always"},
    "nvme": {"weights": "nvme", "states": "nvme"},
    "states": {"weights": "host", "states": "nvme"},
    "budget": {},  # whatever does not fit is on NVMe
}
QUICK = [("nvme", "step"), ("states", "backward"), ("budget", "clip")]
OPTIONS = {"step": {}, "backward": {"update": "backward"}, "clip": {"max_grad_norm": 0.05}}


class Run:
    """A model whose training calls strike() at every moment."""

    def __init__(self, nvme, placement, options, device="cpu"):
        limit = {"host_memory": budget(9_000_000)} if placement == "budget" else {}
        self.engine = zinf.Engine(nvme=nvme, **PLACEMENTS[placement], **limit)
        torch.manual_seed(0)
        with self.engine.init():
            layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
            self.model = nn.Sequential(*layers).to(device)
        self.device = device
        self.optimizer = zinf.AdamW(self.model.parameters(), lr=LR, **OPTIONS[options])

    def train(self, first, last, strike=lambda: None):
        losses = []
        for step in range(first, last):
            strike()
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(self.device)
            for index, layer in enumerate(self.model):
                x = layer(x)
                if index == LAYERS // 2:
                    strike()
                    x.register_hook(lambda grad: strike())
            loss = x.square().mean()
            loss.backward()
            losses.append(loss.detach().cpu())
            strike()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return outcome(losses, self.model, self.optimizer).hash


class Strike:
    """Flips bits at one moment of a run."""

    def __init__(self, nvme, seed, steps):
        self.nvme, self.seed = nvme, seed
        self.at = random.Random(seed).randrange(MOMENTS * steps)
        self.flipped, self.moments = 0, 0

    def __call__(self):
        if self.moments == self.at:
            self.flipped = flip_open_files(self.nvme, self.seed)
        self.moments += 1


def check_seeds(run, nvme, saved, seeds):
    """Each seed's flips raise an error, or change nothing: how many raised."""
    with run.engine:
        run.train(0, SAVED)
        run.engine.save(saved)
        expected = run.train(SAVED, LAST)
        raised = 0
        for seed in seeds:
            run.engine.load(saved)
            strike = Strike(nvme, seed, LAST - SAVED)
            result, error = attempt(lambda strike=strike: run.train(SAVED, LAST, strike))
            assert strike.flipped, f"seed {seed}: no file of the engine was open"
            if error is None:
                assert result == expected, f"seed {seed}: other weights, and no error"
            else:
                raised += 1
                assert re.search(CORRUPT, error), error
                run.engine.load(saved)
                assert run.train(SAVED, LAST) == expected, f"seed {seed}: other weights after load()"
        return raised


@pytest.mark.parametrize("placement, options", [*product(["evict"], OPTIONS), *QUICK])
def test_a_flip_in_scratch_is_an_error_or_changes_nothing(placement, options, nvme, tmp_path):
    raised = check_seeds(Run(nvme, placement, options), nvme, tmp_path / "saved", range(20))
    assert raised > 5 or placement != "evict"  # elsewhere what is hit may not be read again


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_flips_in_scratch_over_many_seeds(placement, options, nvme, tmp_path):
    raised = check_seeds(Run(nvme, placement, options), nvme, tmp_path / "saved", range(20, 220))
    assert raised > 50 or placement != "evict"


@pytest.mark.parametrize("kind, on", [("flip", "read"), ("lost", "write")])
@pytest.mark.parametrize("mode", ["step", "backward", "step-split"])
def test_every_transfer_of_a_step_that_brings_other_bytes_is_found(mode, kind, on, faults, nvme, tmp_path):  # noqa: F811
    with started(nvme, tmp_path, mode) as (run, saved, expected):
        raised = 0
        for nth in every_number(faults):
            run.engine.load(saved)
            faults.set(kind, on, nth)
            result, error = attempt(run.train)
            if error is None:
                assert result == expected, f"{on} {nth}: other weights, and no error"
            else:
                raised += 1
                assert re.search(CORRUPT, error), error
                run.engine.load(saved)
                assert run.train() == expected, nth
        assert raised > 4


def check_save_flips(nvme, tmp_path, seeds):
    with started(nvme, tmp_path, "step") as (run, saved, expected):
        (path,) = [path for path in Path(saved).iterdir() if path.name == "volume.zinf"]
        file = os.open(path, os.O_RDWR)
        ranges = list(data_ranges(file))
        raised = 0
        for seed in seeds:
            generator = random.Random(seed)
            begin, end = generator.choices(ranges, [end - begin for begin, end in ranges])[0]
            offset, bit = generator.randrange(begin, end), generator.randrange(8)
            flip(file, offset, bit)
            _, error = attempt(lambda: run.engine.load(saved))
            flip(file, offset, bit)
            if error is None:
                assert run.train() == expected, f"other weights after a flip at {offset}"
            else:
                raised += 1
                assert str(saved) in error, error
        run.engine.load(saved)
        assert run.train() == expected
        os.close(file)
        return raised


def test_a_flip_in_a_save_is_an_error_or_changes_nothing(nvme, tmp_path):
    assert check_save_flips(nvme, tmp_path, range(40)) > 4


@pytest.mark.full
def test_flips_in_a_save_over_many_seeds(nvme, tmp_path):
    assert check_save_flips(nvme, tmp_path, range(40, 2040)) > 200


def test_every_read_of_a_load_that_brings_other_bytes_is_found(faults, nvme, tmp_path):  # noqa: F811
    with started(nvme, tmp_path, "step") as (run, saved, expected):
        raised = 0
        for nth in every_number(faults, at_least=4):
            faults.set("flip", "read", nth)
            _, error = attempt(lambda: run.engine.load(saved))
            if error is None:
                result, error = attempt(run.train)
                assert error is not None or result == expected, nth
            raised += error is not None
            faults.clear()
            run.engine.load(saved)
            assert run.train() == expected, nth
        assert raised > 4


RANKS = (
    f"""
sys.path.insert(0, {os.path.dirname(__file__)!r})
"""
    + """
from flips import flip_open_files
nvme, saved, seeds = sys.argv[1], sys.argv[2], range(int(sys.argv[3]))
engine, model, optimizer = start(
    engine_options={"nvme": nvme, "weights": "nvme", "states": "nvme", "evict": "always"})
train(model, optimizer, range(2))
engine.save(saved)
train(model, optimizer, range(2, 4))
expected = digest(model)
outcomes = []
for seed in seeds:
    engine.load(saved)
    train(model, optimizer, [2])
    dist.barrier()
    if rank == seed % 2:
        assert flip_open_files(nvme, seed, count=8)
    try:
        train(model, optimizer, [3])
        outcomes.append("same" if digest(model) == expected else "other")
    except Exception as error:
        outcomes.append(str(error))
        break  # a failure ends the group
say(outcomes)
"""
)


def test_a_flip_in_the_scratch_of_a_rank_is_an_error_on_all(nvme, tmp_path):
    said = run_ranks(2, START + RANKS, nvme, tmp_path / "saved", 12)
    both = [json.loads(next(line for line in text.splitlines() if line.startswith("[")))[0] for text in said]
    assert not any("other" in outcomes for outcomes in both), both
    assert all(re.search(CORRUPT, outcomes[-1]) for outcomes in both), both
