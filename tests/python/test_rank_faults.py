"""Ranks that die, stand still or disagree: an error on all of them that says why, never a hang."""

import signal
import time

import pytest
from ranks import Ranks
from test_rank_use import START

TRAIN = """
engine, model, optimizer = start(update=sys.argv[1])
def die(*_):
    if rank == 1:
        os.kill(os.getpid(), 9)
where = sys.argv[2]
for step in range(3):
    if step == 1 and where == "forward":
        model[1].register_forward_hook(die)
    loss = loss_of(model, step)
    if step == 1 and where == "backward":
        model[2].weight.register_hook(die)
    loss.backward()
    if step == 1 and where == "step":
        die()
    optimizer.step()
    optimizer.zero_grad()
print("came to the end", flush=True)
"""


def outputs(size, body, *arguments):
    with Ranks(size, START + body, *arguments) as ranks:
        return ranks.outputs()


@pytest.mark.parametrize("update", [pytest.param("step", marks=pytest.mark.full), "backward"])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_killed_rank_is_named_by_all_others(where, update):
    ends = outputs(4, TRAIN, update, where)
    assert ends[1][0] == -signal.SIGKILL
    for rank in (0, 2, 3):
        code, text = ends[rank]
        assert code == 1, text
        assert "rank 1 of 4 is gone" in text, text
        assert "came to the end" not in text


def test_a_rank_that_stands_still_is_waited_for():
    body = """
engine, model, optimizer = start()
train(model, optimizer, range(2))
print("half", flush=True)
train(model, optimizer, range(2, 200))
print("digest", digest(model), flush=True)
"""
    with Ranks(2, START + body) as ranks:
        assert ranks.processes[1].stdout.readline() == "half\n"
        ranks.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(10)
        ranks.processes[1].send_signal(signal.SIGCONT)
        ends = ranks.outputs()
    assert all(code == 0 for code, _ in ends), ends
    assert ends[0][1].split("digest")[1] == ends[1][1].split("digest")[1]


def check_all_say(ends, text):
    for code, said in ends:
        assert code == 1, said
        assert text in said, said


def test_another_model_is_told_with_its_first_difference():
    ends = outputs(
        3,
        """
torch.manual_seed(0)
engine = zinf.Engine()
with engine.init():
    model = build(200 if rank != 2 else 201)
train(model, zinf.AdamW(model.parameters()), range(2))
""",
    )
    check_all_say(ends, "all ranks must build the same model")


def test_another_model_that_is_adopted_is_told():
    ends = outputs(
        2,
        """
engine = zinf.Engine()
engine.adopt(build(200 + rank))
""",
    )
    check_all_say(ends, "0.weight with shape [201, 30]")


def test_another_number_of_backward_passes_is_told():
    ends = outputs(
        2,
        """
engine, model, optimizer = start()
loss_of(model, 0).backward()
if rank == 1:
    loss_of(model, 0).backward()
optimizer.step()
""",
    )
    check_all_say(ends, "all ranks must make the same backward passes and steps")


@pytest.mark.parametrize("update", ["step", "backward"])
def test_other_options_of_an_optimizer_are_told(update):
    """Each slice would be updated with the options of its keeper."""
    ends = outputs(
        2,
        """
engine, model, optimizer = start(update=sys.argv[1])
train(model, optimizer, range(2))
if rank == 1:
    optimizer.param_groups[0]["lr"] = 0.5
train(model, optimizer, range(2, 4))
""",
        update,
    )
    check_all_say(ends, "with lr=0.5")


def test_clipping_on_one_rank_alone_is_told():
    ends = outputs(
        2,
        """
engine, model, optimizer = start(max_grad_norm=1.0 if rank else None)
train(model, optimizer, range(2))
""",
    )
    check_all_say(ends, "with the same options")


def test_a_save_of_one_rank_alone_is_told(tmp_path):
    ends = outputs(
        2,
        """
engine, model, optimizer = start()
train(model, optimizer, range(2))
if rank == 0:
    engine.save(sys.argv[1])
train(model, optimizer, range(2, 4))
""",
        tmp_path / "saved",
    )
    check_all_say(ends, "engine.save(")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_save_or_load_of_rank_0_alone_is_told_where_the_others_wait_for_rank_0(tmp_path, what):
    ends = outputs(
        2,
        f"""
import zinf.checkpoint
engine, model, optimizer = start()
zinf.checkpoint.patience = lambda: 2.0
if rank == 0:
    engine.{what}(sys.argv[1])
dist.barrier()
""",
        tmp_path / "saved",
    )
    check_all_say(ends, f"rank 0 waits in engine.{what}(")
    check_all_say(ends, "for rank 1, which has not called it: call it on all ranks")
    assert not list(tmp_path.iterdir())


def test_a_load_of_rank_0_alone_is_told_where_the_others_have_ended(tmp_path):
    ends = outputs(
        2,
        """
engine, model, optimizer = start()
if rank == 0:
    engine.load(sys.argv[1])
""",
        tmp_path / "saved",
    )
    assert ends[0][0] == 1
    for _, text in ends:
        assert "rank 1 of 2 is gone: it has ended" in text, text
    assert "engine.load(" in ends[0][1]


def test_a_save_waits_for_other_ranks_less_than_a_collective_of_the_group():
    ends = outputs(
        2,
        """
import datetime
import zinf._ranks
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1000))
print(zinf._ranks.patience(), flush=True)
""",
    )
    assert all(code == 0 and "750.0" in text for code, text in ends), ends


def test_a_save_to_other_places_is_told(tmp_path):
    ends = outputs(
        2,
        """
engine, model, optimizer = start()
engine.save(f"{sys.argv[1]}/{rank}")
""",
        tmp_path,
    )
    check_all_say(ends, "engine.save(")
    assert not list(tmp_path.iterdir())


def test_other_options_of_the_engine_are_told():
    ends = outputs(2, "zinf.Engine(partition_group=1 if rank else None)")
    check_all_say(ends, "partition_group is not the same on rank 0 and rank 1")


def test_a_rank_that_ends_early_is_told():
    ends = outputs(
        2,
        """
engine, model, optimizer = start()
train(model, optimizer, range(2 + rank))
""",
    )
    assert ends[0][0] == 0, ends[0][1]
    assert ends[1][0] == 1
    assert "rank 0 of 2 is gone: it has ended after 4 backward passes" in ends[1][1]


def test_a_change_that_one_rank_makes_alone_is_told():
    ends = outputs(
        2,
        """
engine, model, optimizer = start()
if rank == 0:
    with torch.no_grad():
        model[3].weight.mul_(2)
train(model, optimizer, range(2))
""",
    )
    check_all_say(ends, "outside of training, rank 1 has not")


def test_an_exception_on_one_rank_is_told_by_all():
    ends = outputs(
        3,
        """
engine, model, optimizer = start()
train(model, optimizer, range(2))
if rank == 1:
    raise ValueError("the loader has found a bad file")
train(model, optimizer, range(2, 4))
""",
    )
    check_all_say(ends, "the loader has found a bad file")


@pytest.mark.parametrize("stage", [0, 4, "two", True])
def test_stages_that_there_are_not_are_refused(stage):
    import zinf

    with pytest.raises(ValueError, match="stage is .*, must be 1"):
        zinf.Engine(stage=stage)
