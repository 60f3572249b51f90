"""deterministic="world": the same bits whatever the number of ranks."""

import json

import pytest
import torch
import zinf
from ranks import Ranks, run_ranks
from torch import nn

MICRO_BATCHES = 8  # of a step, over all ranks
STEPS = 3

MODEL = """
import hashlib, json, os, sys
import torch, zinf
from torch import nn

MICRO_BATCHES, STEPS = 8, 3

class Experts(nn.Module):
    # A micro-batch uses one of two experts: gradients are missing in the others.
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 150)
        self.experts = nn.ModuleList([nn.Linear(150, 9), nn.Linear(150, 9)])
        self.late = nn.Linear(9, 9)

    def forward(self, x, number):
        x = self.experts[number % 3 == 0](torch.tanh(self.first(x)))
        return self.late(x) if number < 3 else x

def build(dtype):
    torch.manual_seed(5)
    return Experts().to(dtype)

def loss_of(model, dtype, step, number, divisor):
    generator = torch.Generator().manual_seed(100 * step + number)
    x = torch.randn(4, 16, generator=generator).to(dtype)
    return model(x, number).square().mean() / divisor

def digest(model):
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().clone().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
"""

SCRIPT = (
    MODEL
    + """
dtype = getattr(torch, sys.argv[1])
torch.set_num_threads(1)
engine = zinf.Engine(deterministic="world", **json.loads(sys.argv[2]))
with engine.init():
    model = build(dtype)
rank, ranks = engine.stats()["rank"], engine.stats()["ranks"]
passes = MICRO_BATCHES // ranks
optimizer = zinf.AdamW(model.parameters(), lr=1e-2, update="backward", micro_batches=passes)
losses = {}
for step in range(STEPS):
    for i in range(passes):
        number = i * ranks + rank
        loss = loss_of(model, dtype, step, number, passes)
        loss.backward()
        losses[f"{step}/{number}"] = loss.item() * passes
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps([digest(model), losses]))
engine.close()
"""
)


def add(a, b):
    return b if a is None else a if b is None else a + b


def tree(terms):
    if len(terms) == 1:
        return terms[0]
    middle = len(terms) // 2
    return add(tree(terms[:middle]), tree(terms[middle:]))


def reference(dtype):
    """Plain PyTorch, gradients of micro-batches summed as a tree in float32."""
    names: dict = {}
    exec(MODEL, names)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = names["build"](dtype)
    optimizer = zinf.AdamW(model.parameters(), lr=1e-2)
    parameters = list(model.parameters())
    for step in range(STEPS):
        grads = []
        for number in range(MICRO_BATCHES):
            model.zero_grad()
            names["loss_of"](model, dtype, step, number, MICRO_BATCHES).backward()
            grads.append([None if p.grad is None else p.grad.float() for p in parameters])
        for parameter, terms in zip(parameters, zip(*grads, strict=True), strict=True):
            total = tree(terms)
            parameter.grad = None if total is None else total.to(dtype)
        optimizer.step()
    torch.set_num_threads(before)
    return names["digest"](model)


@pytest.mark.parametrize(
    ("dtype", "place", "worlds"), [("float32", "memory", (1, 2, 4)), ("bfloat16", "nvme", (1, 4))]
)
def test_any_number_of_ranks_gives_one_hash(tmp_path, dtype, place, worlds):
    options = {} if place == "memory" else {"nvme": str(tmp_path), "weights": "nvme", "states": "nvme"}
    expected, first_losses = reference(getattr(torch, dtype)), None
    for ranks in worlds:
        texts = run_ranks(ranks, SCRIPT, dtype, json.dumps(options))
        said = [json.loads(text.splitlines()[-1]) for text in texts]
        assert {digest for digest, _ in said} == {expected}, ranks
        losses = {number: loss for _, each in said for number, loss in each.items()}
        assert len(losses) == STEPS * MICRO_BATCHES
        first_losses = first_losses or losses
        assert losses == first_losses


def test_passes_that_zero_grad_has_dropped_count_for_nothing():
    body = SCRIPT.replace(
        "    optimizer.step()",
        """    optimizer.step()
    optimizer.zero_grad()
    if step == 0:  # a bad micro-batch, and all of it anew
        (loss_of(model, dtype, 99, rank, passes) * float("nan")).backward()
""",
    )
    texts = run_ranks(2, body, "float32", "{}")
    assert {json.loads(text.splitlines()[-1])[0] for text in texts} == {reference(torch.float32)}


def test_other_numbers_of_ranks_give_other_bits_without_it():
    """Otherwise the test above could not fail."""
    script = SCRIPT.replace('deterministic="world"', 'deterministic="ranks"')
    texts = [run_ranks(ranks, script, "float32", "{}")[0] for ranks in (1, 4)]
    one, four = [json.loads(text.splitlines()[-1]) for text in texts]
    assert one[0] != four[0]
    # But it is rounding: the losses of the same micro-batches are close.
    common = one[1].keys() & four[1].keys()
    assert len(common) == STEPS * MICRO_BATCHES // 4
    assert all(one[1][number] == pytest.approx(four[1][number], rel=1e-4) for number in common)


def test_three_ranks_are_refused():
    with Ranks(3, 'import zinf; zinf.Engine(deterministic="world")') as ranks:
        for code, text in ranks.outputs():
            assert code == 1
            assert "with 3 ranks: their number must be a power of two" in text


@pytest.mark.parametrize(
    "options",
    [{"update": "step"}, {"update": "backward", "max_grad_norm": 1.0},
     {"update": "backward", "micro_batches": 3}],
    ids=["step", "clipped", "three"],
)  # fmt: skip
def test_what_would_depend_on_the_ranks_is_refused(options):
    with zinf.Engine(deterministic="world") as engine:
        with engine.init():
            model = nn.Linear(4, 4)
        before = model.weight.detach().clone()
        optimizer = zinf.AdamW(model.parameters(), **options)
        with pytest.raises(RuntimeError, match=r"micro_batches=\.\.\.\), a power of two, and without max"):
            model(torch.randn(2, 4)).sum().backward()
        assert optimizer.state_dict()["state"] == {}
        assert torch.equal(model.weight, before)


def test_an_unknown_word_is_refused():
    with pytest.raises(ValueError, match='deterministic is "yes", must be "ranks"'):
        zinf.Engine(deterministic="yes")
