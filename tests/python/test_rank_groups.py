"""partition_group: models split inside groups of ranks that are replicas of each other."""

import signal

import pytest
import zinf
from ranks import Ranks
from test_rank_use import START, said
from test_ranks import IN_BACKWARD, IN_STEP, check_group

TWO = {"partition_group": 2}


def test_groups_give_the_reference(nvme):
    away = {"nvme": nvme, "weights": "nvme", "states": "nvme"}
    check_group(
        4,
        [
            ["mlp", TWO, IN_STEP],
            ["mlp", {**TWO, **away}, IN_BACKWARD],
            ["mlp", {"partition_group": 1, "stage": 2}, IN_BACKWARD],
            ["branching", TWO, IN_BACKWARD],
            ["gpt2-accumulate", TWO, {"update": "backward", "micro_batches": 3}],
        ],
    )


@pytest.mark.full
def test_more_models_in_groups_give_the_reference():
    check_group(
        4,
        [
            ["mlp", {"partition_group": 4}, IN_STEP],
            ["mixtral", TWO, IN_BACKWARD],
            ["gpt2-max-norm", TWO, IN_STEP],
            ["llama-bf16", TWO, IN_BACKWARD],
            ["mlp-fp16", TWO, IN_STEP],
        ],
    )


TRAFFIC = """
engine, model, optimizer = start(engine_options={"partition_group": 2, "evict": "always"}, update="backward")
train(model, optimizer, range(3))
before = engine.stats()
train(model, optimizer, range(3, 7))
after = engine.stats()
each = {name: (after[name] - before[name]) / 4 for name in after
        if name in ("weights_bytes_received", "grads_bytes_sent", "between_groups_bytes_sent")}
say(each, 4 * sum(parameter.numel() for parameter in model.parameters()), 4 * model[0].weight.numel())
"""


def test_bytes_are_those_of_the_formula():
    """N ranks in groups of G, S bytes: 3 S (G-1)/G inside a group, 2 S/G (R-1)/R between R = N/G groups.

    Backward does not need the first layer's weight.
    """
    rows = [rank[0] for rank in said(4, TRAFFIC)]
    size, first = rows[0][1:]
    mean = {name: sum(row[0][name] for row in rows) / 4 / size for name in rows[0][0]}
    assert mean["weights_bytes_received"] == pytest.approx((2 - first / size) * 1 / 2, rel=0.05)
    assert mean["grads_bytes_sent"] == pytest.approx(1 / 2, rel=0.05)
    assert mean["between_groups_bytes_sent"] == pytest.approx(2 / 2 * 1 / 2, rel=0.05)


CHECKPOINT = """
import os
path, group, load = sys.argv[1], int(sys.argv[2]) or None, sys.argv[3] == "load"
engine, model, optimizer = start(engine_options={"partition_group": group})
if load:
    say(engine.load(path)[0])
else:
    train(model, optimizer, range(2))
    engine.save(path)
say(digest(model))
for parameter in model.parameters():
    grad = torch.zeros_like(parameter)
    parameter.grad = grad
optimizer.step()  # the moments are seen in it
say(digest(model))
"""


@pytest.mark.full  # half a minute; test_rank_use.py has the same without groups
def test_a_checkpoint_of_groups_is_loaded_by_any_number_of_ranks(tmp_path):
    path = tmp_path / "saved"
    saved = said(4, CHECKPOINT, path, 2, "save")
    assert all(rows == saved[0] for rows in saved)
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in sorted(path.iterdir())]
    assert len(sizes) == 4 and max(sizes[2:]) < min(sizes[:2])  # the second group has nothing to add
    for ranks, group in ((1, 0), (2, 0), (4, 2)):
        for rows in said(ranks, CHECKPOINT, path, group, "load"):
            assert rows == [[2], *saved[0]]


def test_a_killed_rank_of_another_group_is_named():
    body = """
engine, model, optimizer = start(engine_options={"partition_group": 2})
train(model, optimizer, range(2))
if rank == 3:
    import os
    os.kill(os.getpid(), 9)
train(model, optimizer, range(2, 4))
"""
    with Ranks(4, START + body) as ranks:
        ends = ranks.outputs()
    assert ends[3][0] == -signal.SIGKILL
    for code, text in ends[:3]:
        assert code not in (0, -signal.SIGKILL)
        assert "rank 3" in text, text


def test_groups_that_differ_are_told():
    body = """
if rank >= 2:
    build = lambda: torch.nn.Sequential(torch.nn.Linear(30, 77))
engine, model, optimizer = start(engine_options={"partition_group": 2})
train(model, optimizer, range(2))
"""
    with Ranks(4, START + body) as ranks:
        ends = ranks.outputs()
    assert all(code != 0 for code, _ in ends)
    assert any("more or fewer parameters" in text for _, text in ends), ends


def test_groups_with_other_shapes_are_told():
    body = """
width = 200 if rank < 2 else 232
engine = zinf.Engine(partition_group=2)
with engine.init():
    model = build(width)
optimizer = zinf.AdamW(model.parameters())
train(model, optimizer, range(2))
"""
    with Ranks(4, START + body) as ranks:
        ends = ranks.outputs()
    assert all(code != 0 for code, _ in ends)
    assert any("other parameters" in text for _, text in ends), ends


@pytest.mark.parametrize(
    ("options", "message"),
    [('{"partition_group": 3}', "partition_group is 3, must divide the number of ranks, 4"),
     ('{"partition_group": 2, "deterministic": "world"}', "does not work with partition_group")],
)  # fmt: skip
def test_groups_that_do_not_fit_are_refused(options, message):
    with Ranks(4, f"import zinf; zinf.Engine(**{options})") as ranks:
        for code, text in ranks.outputs():
            assert code == 1
            assert message in text


@pytest.mark.parametrize("value", [0, -1, "two", True, 1.5])
def test_what_is_no_number_of_ranks_is_refused(value):
    with pytest.raises(ValueError, match="partition_group is .*, must be a number of ranks"):
        zinf.Engine(partition_group=value)
