"""An error on one rank, wherever it happens: the others are told, also where the script catches it."""

import json

import pytest
from test_rank_faults import check_all_say, outputs
from test_rank_use import said

# Where rank 1 raises. `fail` raises there, and everything else is as it was.
PLACES = {
    "a hook of a gradient": "model[3].weight.register_hook(fail)",
    "a hook after a gradient": "model[3].weight.register_post_accumulate_grad_hook(fail)",
    "a backward hook of a module": "model[1].register_full_backward_hook(fail)",
    "begin_step": "break_ranks('begin_step')",
    "the norm": "break_ranks('sum_over_slices')",
    "clipping": "optimizer._clip_factor = fail",
    "the update": "optimizer._update = fail",
    "end_step": "break_ranks('end_step')",
}
IN_STEP = list(PLACES)[3:]

ONE_RAISES = """
import datetime
import zinf.optim

class Broken:
    def __init__(self, ranks, method):
        self._ranks, self._method = ranks, method

    def __getattr__(self, name):
        return fail if name == self._method else getattr(self._ranks, name)

def break_ranks(method):
    zinf.optim.ranks_of = lambda parameters: [Broken(each, method) for each in ranks_of(parameters)]

def fail(*_, **__):
    raise RuntimeError("the disk is on fire")

def after_all_ranks(what):  # none of them ends meanwhile
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{what} {rank}", "")
    store.wait([f"{what} {each}" for each in range(size)], datetime.timedelta(seconds=60))

ranks_of = zinf.optim.ranks_of
for update in json.loads(sys.argv[2]):
    for place, breaks in json.loads(sys.argv[1]).items():
        engine, model, optimizer = start(update=update, max_grad_norm=1.0 if update == "step" else None)
        train(model, optimizer, range(1))
        if rank == 1:
            exec(breaks)
        said = []
        for attempt in (lambda: train(model, optimizer, range(1, 3)), optimizer.step):
            try:
                attempt()
                said.append("nothing")
            except Exception as error:
                said.append(str(error))
            zinf.optim.ranks_of = ranks_of
        say(update, place, *said)
        after_all_ranks(f"{update} {place}")
        engine.close(discard=True)
after_all_ranks("the end")
"""


def test_an_error_inside_backward_or_step_is_told_while_its_rank_lives_on():
    first, second = said(2, ONE_RAISES, json.dumps(PLACES), '["step"]')
    assert len(first) == len(second) == len(PLACES)
    for (_, place, told, _), (_, _, own, again) in zip(first, second, strict=True):
        assert "the disk is on fire" in own, place
        assert "rank 1 of 2 failed: " in told, (place, told)
        if place in IN_STEP:
            assert "rank 1 of 2 failed: the disk is on fire" in told, (place, told)
            assert "weights and states do not fit together (the disk is on fire)" in again, (place, again)
        else:
            assert "an exception ended a backward pass half way" in told, (place, told)


def test_an_error_in_an_update_inside_backward_is_told_while_its_rank_lives_on():
    places = {place: PLACES[place] for place in ("a hook of a gradient", "the update")}
    first, second = said(2, ONE_RAISES, json.dumps(places), '["backward"]')
    for (_, place, told, _), (_, _, own, _) in zip(first, second, strict=True):
        assert "the disk is on fire" in own, place
        assert "rank 1 of 2 failed: " in told, (place, told)


def test_a_sparse_gradient_is_refused_by_all_ranks():
    ends = outputs(
        2,
        """
engine = zinf.Engine()
with engine.init():
    model = torch.nn.Embedding(30, 8, sparse=True)
model(torch.tensor([1, 2])).sum().backward()
""",
    )
    check_all_say(ends, "has a sparse gradient: build the embedding with sparse=False")


@pytest.mark.parametrize(
    "where", ["model[1].register_forward_hook(fail)", "optimizer.register_step_pre_hook(fail)"]
)
def test_an_error_that_ends_the_script_of_one_rank_is_told(where):
    ends = outputs(
        2,
        f"""
engine, model, optimizer = start()
train(model, optimizer, range(1))
def fail(*_):
    raise ValueError("a bad batch")
if rank == 1:
    {where}
train(model, optimizer, range(1, 3))
""",
    )
    check_all_say(ends, "a bad batch")


def test_a_rank_that_catches_an_error_of_its_forward_goes_on_with_another_batch():
    rows = said(
        2,
        """
engine, model, optimizer = start()
seen = []
def fail_once(*_):
    if rank == 1 and len(seen) == 2:
        seen.append("failed")
        raise ValueError("a bad batch")
    seen.append("fine")
model[1].register_forward_hook(fail_once)
step = 0
while step < 4:
    try:
        loss = loss_of(model, step)
    except ValueError:
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
say(digest(model), "failed" in seen)
""",
    )
    assert rows[0][0][0] == rows[1][0][0]
    assert [row[0][1] for row in rows] == [False, True]
