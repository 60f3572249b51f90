"""What fits once fits for ever: any lengths, for as long as one likes, at exactly what probe() names."""

import random

import pytest
import torch
import zinf
from torch import nn
from torch.nn import functional as F
from twins import LR, born, budget

VOCABULARY = 512
WIDTH = 64
LENGTH = 128
STEPS = 120


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        split = self.qkv(self.first(x)).view(rows, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.second(x))))


def gpt():
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))


def mlp():
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.ReLU(),
        nn.Linear(2 * WIDTH, VOCABULARY),
    )


def backward(model, length):
    x = torch.randint(VOCABULARY, (2, length))
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()


MODES = {
    "ram": None,
    "nvme": {"update": "step"},
    "clipped": {"update": "step", "max_grad_norm": 1.0},
    "backward": {"update": "backward"},
}


@pytest.mark.parametrize("build", [gpt, mlp])
@pytest.mark.parametrize("mode", MODES)
def test_random_lengths_fit_in_what_the_probe_of_the_largest_names(nvme, build, mode):
    options = MODES[mode]
    path = nvme if options else None
    with zinf.Engine(host_memory=budget(1 << 30), nvme=path) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR, **(options or {}))
        least = engine.probe(lambda: backward(model, LENGTH)).least_bytes
    del model, optimizer
    least -= budget(0)
    with zinf.Engine(host_memory=budget(least), nvme=path) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR, **(options or {}))
        lengths = random.Random(0)
        for _ in range(STEPS):
            backward(model, lengths.randint(1, LENGTH))
            optimizer.step()
            optimizer.zero_grad()
        stats = engine.stats()
        assert stats["host_used_bytes"] <= stats["host_limit_bytes"]
