"""engine.init(): the values of a plain build, and never more in memory than is allowed."""

import pytest
import torch
import transformers
import zinf
from conftest import process_io
from torch import nn
from twins import budget

CONFIG = dict(n_layer=8, n_head=4, n_embd=384, vocab_size=512, n_positions=64)


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))


def sizes(model):
    return [p.numel() * p.element_size() for p in model.parameters()]


def assert_same_state(ours, plain):
    theirs = plain.state_dict()
    mine = ours.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name].clone(), value), name


def test_from_config_has_the_values_of_a_plain_build(nvme):
    plain = gpt2()
    allowed = sum(sizes(plain)) // 4
    with zinf.Engine(nvme=nvme, host_memory=budget(allowed)) as engine:
        with engine.init():
            model = gpt2()
        stats = engine.stats()
        assert stats["managed"] == len(sizes(plain))
        assert stats["peak_resident_bytes"] <= allowed + max(sizes(plain))
        assert stats["host_used_bytes"] <= stats["host_limit_bytes"]
        assert_same_state(model, plain)


def test_random_numbers_go_on_as_after_a_plain_build(nvme):
    gpt2()
    wanted = torch.rand(3)
    with zinf.Engine(nvme=nvme, weights="nvme", evict="always") as engine:
        with engine.init():
            gpt2()
        assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("shard_size", ["100MB", "1MB"])
def test_from_pretrained_larger_than_memory(nvme, tmp_path, shard_size):
    plain = gpt2()
    plain.save_pretrained(tmp_path / "model", max_shard_size=shard_size)
    allowed = sum(sizes(plain)) // 4
    before = process_io()[1]
    with zinf.Engine(nvme=nvme, host_memory=budget(allowed)) as engine:
        with engine.init():
            model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
        stats = engine.stats()
        assert stats["managed"] == len(sizes(plain))
        assert stats["peak_resident_bytes"] <= allowed + max(sizes(plain))
        assert stats["host_used_bytes"] <= stats["host_limit_bytes"]
        assert process_io()[1] - before >= sum(sizes(plain)) - allowed
        assert_same_state(model, plain)


def test_buffers_stay_ordinary_tensors(nvme):
    with zinf.Engine(nvme=nvme, weights="nvme", evict="always") as engine:
        with engine.init():
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        assert engine.stats()["managed"] == 4
        model(torch.randn(2, 3, 8, 8))
        assert model[1].running_mean.abs().sum() > 0


def test_an_exception_inside_leaves_nothing_behind(nvme):
    with zinf.Engine(nvme=nvme, weights="nvme") as engine:
        with pytest.raises(ZeroDivisionError), engine.init():
            nn.Linear(64, 64)
            _ = 1 / 0
        assert engine.stats()["managed"] == 0
        layer = nn.Linear(8, 8)
        assert engine.stats()["managed"] == 0, "the mode is over"
        layer(torch.ones(1, 8))


def test_it_cannot_be_nested(nvme):
    with zinf.Engine(nvme=nvme) as engine, engine.init():
        with pytest.raises((RuntimeError, ValueError), match="nested"), engine.init():
            pass
