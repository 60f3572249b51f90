"""Several ranks in use: what scripts do between steps, what goes over the wire, and what is kept where."""

import json

import pytest
from ranks import run_ranks

START = """
import hashlib, json, os, sys
import torch, zinf
import torch.distributed as dist
import torch.nn.functional as F

torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def build(width=200):
    return torch.nn.Sequential(
        torch.nn.Linear(30, width), torch.nn.Tanh(), torch.nn.LayerNorm(width), torch.nn.Linear(width, 77))

def batch(step, of=rank):
    generator = torch.Generator().manual_seed(1000 * step + of)
    return torch.randn(8, 30, generator=generator), torch.randn(8, 77, generator=generator)

def loss_of(model, step, of=rank):
    inputs, targets = batch(step, of)
    return F.mse_loss(model(inputs), targets)

def digest(model):
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().clone().numpy().tobytes())
    return sha.hexdigest()

def start(seed=0, engine_options={}, **options):
    torch.manual_seed(seed)
    engine = zinf.Engine(**engine_options)
    with engine.init():
        model = build()
    return engine, model, zinf.AdamW(model.parameters(), lr=1e-2, **options)

def train(model, optimizer, steps, between=lambda step: None):
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)

def moments(model, optimizer):
    return [float(optimizer.state[parameter]["exp_avg"].double().sum()) for parameter in model.parameters()]

def say(*what):
    print(json.dumps(what), flush=True)
"""


def said(size, body, *arguments):
    """The rows that each rank has said."""
    texts = run_ranks(size, START + body, *arguments)
    return [[json.loads(line) for line in text.splitlines() if line.startswith("[")] for text in texts]


def test_a_script_without_a_group_works_and_ranks_agree():
    """torchrun's variables are enough."""
    first, second = said(
        2,
        """
engine, model, optimizer = start()
train(model, optimizer, range(3))
say(digest(model), engine.stats()["ranks"], dist.is_initialized())
""",
    )
    assert first == second
    assert first[0][1:] == [2, True]


@pytest.mark.parametrize("evict", [pytest.param("auto", marks=pytest.mark.full), "always"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_one_rank_may_evaluate_generate_and_look_at_gradients_alone(update, evict):
    body = """
engine, model, optimizer = start(update=sys.argv[1], engine_options={"evict": sys.argv[3]})
def look(step):
    if rank == 0 and sys.argv[2] == "looks":
        with torch.no_grad():
            for other in range(5):
                loss_of(model, other, of=7)
        [parameter.detach().numpy().sum() for parameter in model.parameters()]
        torch.save(model.state_dict(), os.devnull)
for step in range(4):
    look(step)
    loss_of(model, step).backward()
    look(step)
    if rank == 0 and sys.argv[1] == "step" and sys.argv[2] == "looks":
        say("norm", float(model[0].weight.grad.norm()))
    optimizer.step()
    optimizer.zero_grad()
    look(step)
say("digest", digest(model))
"""
    looks = said(2, body, update, "looks", evict)
    not_looks = said(2, body, update, "does not", evict)
    assert looks[0][-1] == looks[1][-1] == not_looks[0][-1]


def test_rank_0_decides_about_the_first_weights_and_each_keeps_its_own_generator():
    first, second = said(
        2,
        """
engine, model, optimizer = start(seed=rank + 5)
say(digest(model), torch.rand(()).item())
torch.manual_seed(5)
plain = build()
say(digest(plain), torch.rand(()).item())
torch.manual_seed(6)
say(torch.rand(()).item())
""",
    )
    assert first[0] == first[1]
    assert second[0] == [first[0][0], second[2][0]]


def test_adopted_models_are_rank_0s():
    first, second = said(
        2,
        """
torch.manual_seed(rank)
model = build()
engine = zinf.Engine()
engine.adopt(model)
say(digest(model))
torch.manual_seed(0)
say(digest(build()))
train(model, zinf.AdamW(model.parameters(), lr=1e-2), range(2))
say(digest(model))
""",
    )
    assert first[0] == first[1] == second[0]
    assert first[2] == second[2]


def test_a_gradient_that_somebody_keeps_stays_what_it_was():
    rows = said(
        2,
        """
engine, model, optimizer = start()
loss_of(model, 0).backward()
kept = model[0].weight.grad
before = kept.clone()
optimizer.zero_grad()
loss_of(model, 1).backward()
new = model[0].weight.grad
say(torch.equal(kept, before), torch.equal(kept, new))
optimizer.zero_grad()
loss_of(model, 1).backward()
say(torch.equal(new, model[0].weight.grad))
""",
    )
    assert rows == [[[True, False], [True]]] * 2


def test_changes_that_all_ranks_make_count():
    rows = said(
        3,
        """
engine, model, optimizer = start()
with torch.no_grad():
    model[0].weight.mul_(0.5)
    model[3].weight.data.numpy()[:] = 0.25
model[0].bias.data = torch.full((200,), 0.125)
say(model[0].weight.abs().max().item() <= 0.5 * 30 ** -0.5, model[3].weight.unique().tolist(),
    model[0].bias.unique().tolist())
train(model, optimizer, range(2))
say(digest(model))
""",
    )
    assert all(row[0] == [True, [0.25], [0.125]] for row in rows)
    assert rows[0][1] == rows[1][1] == rows[2][1]


def test_another_optimizer_and_accumulation_by_hand_work():
    rows = said(
        2,
        """
engine, model, _ = start()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train(model, optimizer, range(3))
torch.manual_seed(0)
plain = build()
other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    for of in range(2):
        (loss_of(plain, step, of) / 2).backward()
    other.step()
    other.zero_grad()
say(digest(model), max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters())))
""",
    )
    assert rows[0][0][0] == rows[1][0][0]
    assert rows[0][0][1] < 1e-6


def test_a_rank_without_gradients_takes_part():
    """Its loss does not depend on the parameters; with update="backward" too."""
    rows = said(
        2,
        """
for update in ("step", "backward"):
    engine, model, optimizer = start(update=update)
    for step in range(3):
        if rank == 0 or step != 1:
            loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    say(digest(model))
    engine.close()
""",
    )
    assert rows[0] == rows[1]
    assert rows[0][0] == rows[0][1]


def test_ranks_without_gradients_take_part_in_every_pass():
    """Two of three have none: they go from one pass to the next at once."""
    rows = said(
        3,
        """
options = {"update": "backward", "micro_batches": 2}
engine, model, optimizer = start(**options)
for step in range(30):
    if rank == 1:
        for micro in range(2):
            (loss_of(model, 2 * step + micro) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
say(digest(model))
engine.close()
if rank == 0:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(30):
        for micro in range(2):
            model.zero_grad() if micro == 0 else None
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            (loss_of(model, 2 * step + micro, of=1) / 2).backward()
            for parameter, grad in zip(model.parameters(), before):
                parameter.grad.mul_(torch.tensor(1.0) / 3)
                if grad is not None:
                    parameter.grad = grad + parameter.grad
        optimizer.step()
    say(digest(model))
""",
    )
    assert rows[0][0] == rows[1][0] == rows[2][0] == rows[0][1]


def test_what_is_unfrozen_later_is_averaged():
    rows = said(
        2,
        """
for update in ("step", "backward"):
    torch.manual_seed(0)
    engine = zinf.Engine()
    with engine.init():
        model = build()
        model[0].requires_grad_(False)
    optimizer = zinf.AdamW(model.parameters(), lr=1e-2, update=update)
    train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    train(model, optimizer, range(2, 4))
    say(digest(model))
    engine.close()
""",
    )
    assert rows[0] == rows[1]
    assert rows[0][0] == rows[0][1]


def test_what_is_not_split_is_refused():
    rows = said(
        2,
        """
engine, model, _ = start()
more = torch.nn.Linear(77, 3)
optimizer = zinf.AdamW([*model.parameters(), *more.parameters()])
more(model(batch(0)[0])).sum().backward()
try:
    optimizer.step()
except RuntimeError as error:
    say(str(error))
engine.adopt(more)
optimizer.zero_grad()
more(model(batch(0)[0])).sum().backward()
optimizer.step()
say(digest(more))
""",
    )
    assert all("is not split over the ranks" in row[0][0] for row in rows)
    assert rows[0][1] == rows[1][1]


def test_gradients_that_are_only_asked_for_are_each_ranks_own_matter():
    rows = said(
        2,
        """
engine, model, optimizer = start()
loss_of(model, 0).backward()
before = [parameter.grad.clone() for parameter in model.parameters()]
if rank == 0:
    torch.autograd.grad(loss_of(model, 5), list(model.parameters()))
say(all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters())))
optimizer.step()
say(digest(model))
""",
    )
    assert rows[0] == rows[1]
    assert rows[0][0] == [True]


def test_a_gradient_that_one_rank_keeps_does_no_harm():
    """Of a parameter, too, that its next pass does not use."""
    rows = said(
        2,
        """
engine, model, optimizer = start()
kept = []
for step in range(4):
    loss = loss_of(model, step) if rank or step != 2 else model[0](batch(step)[0]).sum()
    loss.backward()
    if rank == 0:
        kept.append(model[3].weight.grad)
    optimizer.step()
    optimizer.zero_grad()
say(digest(model))
""",
    )
    assert rows[0] == rows[1]


def test_budgets_are_kept_by_every_rank(nvme):
    """host_memory a fifth of what the rank would like to have."""
    body = """
engine_options = json.loads(sys.argv[1])
torch.manual_seed(0)
engine = zinf.Engine(**engine_options)
with engine.init():
    model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(12)])
optimizer = zinf.AdamW(model.parameters(), lr=1e-3, update="backward")
for step in range(4):
    generator = torch.Generator().manual_seed(step * 10 + rank)
    model(torch.randn(4, 700, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
stats = engine.stats()
say(digest(model), stats["host_peak_bytes"] <= stats["host_limit_bytes"] * 1.05)
"""
    free = said(2, body, json.dumps({}))
    tight = said(2, body, json.dumps({"host_memory": "30MB", "nvme": nvme}))
    assert [row[0][0] for row in tight] == [row[0][0] for row in free]
    assert all(row[0][1] for row in tight), tight


def test_bytes_between_ranks_are_those_of_zero():
    """Weights are gathered twice a step with stage 3, once with stage 2; gradients go once."""
    rows = said(
        2,
        """
for stage in (3, 2):
    engine, model, optimizer = start(engine_options={"stage": stage}, update="backward")
    train(model, optimizer, range(3))
    before = engine.stats()
    train(model, optimizer, range(3, 7))
    after = engine.stats()
    bytes_of = {name: (after[name] - before[name]) / 4
                for name in ("weights_bytes_received", "grads_bytes_sent")}  # what this rank decides
    say(stage, bytes_of, 4 * sum(parameter.numel() for parameter in model.parameters()))
    engine.close()
""",
    )
    for stage, *_ in ((3,), (2,)):
        rows_of = [row for rank in rows for row in rank if row[0] == stage]
        weights = sum(row[1]["weights_bytes_received"] for row in rows_of)
        grads = sum(row[1]["grads_bytes_sent"] for row in rows_of)
        model_bytes = rows_of[0][2]
        # All ranks together: each needs what the other has. What stays in memory unused is small.
        assert weights <= (2 if stage == 3 else 1) * model_bytes * 1.01
        headers = 16 * 150  # of closes and parts
        assert model_bytes <= grads <= model_bytes + headers


def test_the_difference_to_distributed_data_parallel_is_rounding():
    """DDP divides and sums in the order of a ring; the sums of both are of the same numbers."""
    for rows in said(
        3,
        """
torch.manual_seed(0)
dist.init_process_group("gloo")
theirs = torch.nn.parallel.DistributedDataParallel(build())
reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
for step in range(5):
    loss_of(theirs, step).backward()
    reference.step()
    reference.zero_grad()
engine, model, optimizer = start()
train(model, optimizer, range(5))
gap = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), theirs.module.parameters()))
moved = max(float((a - b).abs().max()) for a, b in zip(build().parameters(), theirs.module.parameters()))
say(gap, moved)
""",
    ):
        gap, moved = rows[0]
        assert gap < 1e-3 * moved


def test_a_wrapper_that_averages_too_is_refused():
    rows = said(
        2,
        """
engine, model, optimizer = start()
try:
    torch.nn.parallel.DistributedDataParallel(model)
except RuntimeError as error:
    say(str(error))
""",
    )
    assert all("zinf averages its gradients already" in row[0][0] for row in rows)


def test_checkpoints_of_any_number_of_ranks_are_loaded_by_any_other(tmp_path):
    """What goes on after a load is what would have gone on without: with as many ranks, to the bit."""
    save = """
engine, model, optimizer = start(update=sys.argv[2])
train(model, optimizer, range(2))
engine.save(sys.argv[1], extra={"rank": rank})
say(digest(model), moments(model, optimizer))
train(model, optimizer, range(2, 4))
say(digest(model))
"""
    load = """
engine, model, optimizer = start(seed=9, update=sys.argv[2])
step, extra = engine.load(sys.argv[1])
say(digest(model), moments(model, optimizer), step, extra)
train(model, optimizer, range(2, 4))
say(digest(model))
"""
    saved = {}
    for size in (1, 2, 3):
        saved[size] = said(size, save, tmp_path / str(size), "step")
    for size, count in ((2, 2), (1, 2), (2, 1), (3, 2), (2, 3)):
        loaded = said(count, load, tmp_path / str(size), "backward" if size == 2 else "step")
        assert all(rank[0][0] == saved[size][0][0][0] for rank in loaded), (size, count)
        moments = [sum(rank[0][1][i] for rank in loaded) for i in range(4)]
        expected = [sum(rank[0][1][i] for rank in saved[size]) for i in range(4)]
        assert moments == pytest.approx(expected, rel=1e-9)
        assert loaded[0][0][2:] == [2, {"rank": 0}]
        if size == count:
            assert loaded[0][1] == saved[size][0][1]


def test_a_checkpoint_of_ranks_that_is_not_whole_is_refused(tmp_path):
    rows = said(2, """
import shutil
engine, model, optimizer = start()
train(model, optimizer, range(1))
path = sys.argv[1]
engine.save(path)
try:
    engine.save(path)
except (ValueError, RuntimeError) as error:
    say(str(error))
dist.barrier()
if rank == 0:
    shutil.rmtree(os.path.join(path, "rank-00001-of-00002"))
dist.barrier()
try:
    engine.load(path)
except ValueError as error:
    say(str(error))
""", tmp_path / "run")  # fmt: skip
    assert "exists already" in rows[0][0][0]
    assert all("it has no rank-00001-of-00002" in row[1][0] for row in rows)
