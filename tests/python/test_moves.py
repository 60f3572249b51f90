"""How states travel: small ones together."""

import pytest
import torch
import zinf
from torch import nn
from twins import budget

MIB = 1 << 20
LAYERS, WIDTH = 160, 128  # a weight is 64 KiB


def small_units():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def train(model, optimizer, steps):
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def test_small_units_share_requests(nvme):
    plain = small_units()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True), 10)
    expected = weights(plain)
    del plain
    with zinf.Engine(host_memory=budget(16 * MIB), nvme=nvme) as engine:
        with engine.init():
            model = small_units()
        optimizer = zinf.AdamW(model.parameters(), lr=1e-3, update="backward")
        train(model, optimizer, 5)
        before = engine.stats()
        train(model, optimizer, 5)
        after = engine.stats()
        moves = sum(after[name] - before[name] for name in ("reads", "writes"))
        requests = after["nvme_requests"] - before["nvme_requests"]
        assert moves > 5 * LAYERS
        assert requests < moves / 3
        assert after["updated_parameters"] - before["updated_parameters"] == 5 * LAYERS * WIDTH * WIDTH
        assert after["update_cpu_seconds"] > before["update_cpu_seconds"]
        assert weights(model) == expected


def test_steps_of_other_optimizers_are_planned_too(nvme):
    def optimizer_of(model):
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    plain = small_units()
    train(plain, optimizer_of(plain), 6)
    with zinf.Engine(host_memory=budget(22 * MIB), nvme=nvme) as engine:
        with engine.init():
            model = small_units()
        train(model, optimizer_of(model), 6)
        stats = engine.stats()
        assert stats["steps"] == 6
        assert stats["step_bytes_read"] > 0
        assert stats["planned_step_bytes"] > 0
        assert stats["step_prefetched"] > 0
        assert weights(model) == weights(plain)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_without_prefetching_every_read_is_waited_for(update, nvme, monkeypatch):
    monkeypatch.setenv("ZINF_PREFETCH", "0")
    with zinf.Engine(host_memory=budget(16 * MIB), nvme=nvme) as engine:
        with engine.init():
            model = small_units()
        train(model, zinf.AdamW(model.parameters(), lr=1e-3, update=update), 4)
        stats = engine.stats()
        assert stats["step_bytes_read"] > 0
        assert stats["step_prefetched"] == 0


def test_a_prefetch_setting_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("ZINF_PREFETCH", "no")
    with pytest.raises(ValueError, match='ZINF_PREFETCH in the environment is "no": 0 turns'):
        zinf.Engine()
