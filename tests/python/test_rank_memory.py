"""What ranks hold and send, against the formulas of ZeRO."""

import pytest
from test_rank_use import said

# Four layers of 1024 x 1024, in bfloat16, after a backward pass that follows a step.
BODY = """
engine_stage = int(sys.argv[1])
engine = zinf.Engine(stage=engine_stage)
with engine.init():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(torch.bfloat16)
optimizer = zinf.AdamW(model.parameters(), lr=1e-3, master=sys.argv[2])

def backward(step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(4, 1024, generator=generator).to(torch.bfloat16)).float().square().mean().backward()

for step in range(2):
    backward(step)
    optimizer.step()
    optimizer.zero_grad()
backward(2)
dist.barrier()
stats = engine.stats()
parameters = sum(parameter.numel() for parameter in model.parameters())
wholes = stats["gathered_bytes"] if engine_stage < 3 else 0  # only for their uses, and ahead of them
say((stats["resident_bytes"] + wholes) / parameters)
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("stage", "master", "formula"),
    [
        # 2 bytes of weights, 2 of gradients, 12 of states with the master; a split master is 2 of these less,
        # and where weights are whole the slice of them that a rank updates is a part of its master.
        (3, "plain", lambda n: (2 + 2 + 12) / n),
        (3, "split", lambda n: (2 + 2 + 10) / n),
        (2, "split", lambda n: 2 + (2 + 12) / n),
        (1, "split", lambda n: 2 + (2 + 12) / n),  # gradients are never kept whole
    ],
    ids=["3-plain", "3-split", "2", "1"],
)
def test_a_rank_holds_what_the_formula_says(ranks, stage, master, formula):
    for rows in said(ranks, BODY, stage, master):
        assert rows[0][0] == pytest.approx(formula(ranks), rel=0.05)


WIRE = """
def on_the_wire():
    with open("/proc/net/dev") as file:
        lines = [line.split() for line in file if line.strip().startswith("lo:")]
    return int(lines[0][9])

engine = zinf.Engine(evict="always")  # nothing stays from forward to backward
with engine.init():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
optimizer = zinf.AdamW(model.parameters(), lr=1e-3, update="backward")

def sent():
    stats = engine.stats()
    return stats["weights_bytes_sent"] + stats["grads_bytes_sent"]

def step():
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
dist.barrier()
before = sent(), on_the_wire()
dist.barrier()
for _ in range(5):
    step()
dist.barrier()
after = sent(), on_the_wire()
parameters = sum(parameter.numel() for parameter in model.parameters())
say(after[0] - before[0], after[1] - before[1], 4 * parameters)
"""


def test_what_is_counted_is_what_goes_over_the_wire():
    """At the loopback device, which has little else to carry."""
    (first,), (second,) = said(2, WIRE)
    counted, carried, model_bytes = first[0] + second[0], first[1], first[2]
    assert carried == pytest.approx(counted, rel=0.05)
    # Both ranks together: weights twice (the first layer's once), gradients once, to the other one.
    assert counted == pytest.approx(5 * model_bytes * (3 - 1 / 4), rel=0.05)
