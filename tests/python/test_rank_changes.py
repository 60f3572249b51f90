"""Ranks that change a weight differently outside of training: an error on all of them, never a mixture."""

import json

import pytest
from test_rank_faults import check_all_say, outputs
from test_rank_use import said

CHANGES = {
    "in place": "model[3].weight.mul_(rank + 1)",
    "through an address": "model[3].weight.data.numpy()[0, 0] = rank",
    "by .data": "model[3].weight.data = torch.full((77, 200), float(rank))",
    "by a load": "model.load_state_dict({k: v + rank for k, v in model.state_dict().items()})",
    "of one bit that is NaN": "model[3].weight.view(torch.int32)[5, 5] = 0x7fc00000 + rank",
}


TRY = """
for name, change in json.loads(sys.argv[1]).items():
    for update in ("step", "backward"):
        engine, model, optimizer = start(update=update)
        train(model, optimizer, range(2))
        before = engine.stats()["updated_parameters"]
        with torch.no_grad():
            exec(change)
        try:
            train(model, optimizer, range(2, 4))
            why = "nothing"
        except (ValueError, RuntimeError) as error:
            why = str(error)
        say(name, update, engine.stats()["updated_parameters"] - before, why)
        engine.close()
"""


def test_a_change_that_ranks_make_differently_is_told_before_anything_is_trained():
    for rows in said(2, TRY, json.dumps(CHANGES)):
        assert len(rows) == 2 * len(CHANGES)
        for name, update, updated, why in rows:
            assert "rank 0 and rank 1 have changed" in why, (name, update, why)
            assert "to different values: all ranks must make the same changes" in why, (name, update, why)
            assert updated == 0, (name, update)


@pytest.mark.parametrize("what", ["engine.save(sys.argv[1])", "optimizer.step()"])
def test_different_changes_are_told_by_a_save_and_by_a_step(tmp_path, what):
    ends = outputs(
        3,
        f"""
engine, model, optimizer = start()
loss_of(model, 0).backward()
with torch.no_grad():
    model[0].bias.add_(1.0 if rank == 1 else 2.0)
{what}
""",
        tmp_path / "saved",
    )
    check_all_say(ends, 'bias" outside of training to different values')
    check_all_say(ends, "rank 1")
    assert not list(tmp_path.iterdir())


def test_gradients_that_ranks_change_differently_are_told():
    ends = outputs(
        2,
        """
engine, model, optimizer = start()
loss_of(model, 0).backward()
model[0].weight.grad.mul_(rank + 1)
optimizer.step()
""",
    )
    check_all_say(ends, "to different values")


def test_groups_that_change_a_weight_differently_are_told():
    """Ranks 0 and 1 have the whole model among them, ranks 2 and 3 another one."""
    ends = outputs(
        4,
        """
engine, model, optimizer = start(engine_options={"partition_group": 2})
train(model, optimizer, range(1))
with torch.no_grad():
    model[3].weight.mul_(rank // 2 + 1)
train(model, optimizer, range(1, 3))
""",
    )
    check_all_say(ends, 'weight" outside of training to different values')


def test_what_is_the_same_again_before_the_next_pass_is_fine():
    """Start values by each rank's own generator, then those of rank 0 for all."""
    rows = said(
        2,
        """
engine, model, optimizer = start()
torch.manual_seed(rank)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
for parameter in model.parameters():
    first = parameter.detach().clone()
    dist.broadcast(first, 0)
    with torch.no_grad():
        parameter.copy_(first)
train(model, optimizer, range(2))
say(digest(model))
""",
    )
    assert rows[0] == rows[1]


def test_other_optimizers_make_the_same_changes_on_all_ranks():
    rows = said(
        3,
        """
for dtype in (torch.float32, torch.bfloat16):
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop):
        torch.manual_seed(0)
        engine = zinf.Engine()
        with engine.init():
            model = build().to(dtype)
        other = kind(model.parameters(), lr=1e-3)
        for step in range(3):
            inputs, targets = batch(step)
            F.mse_loss(model(inputs.to(dtype)).float(), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            other.step()
            other.zero_grad()
        say(digest(model.float()))
        engine.close()
""",
    )
    assert rows[0] == rows[1] == rows[2]
    assert len({digest for (digest,) in rows[0]}) > 4  # they have trained
