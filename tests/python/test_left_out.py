"""What engine.save() does not write, it says; and it does not write nothing."""

import warnings

import pytest
import torch
import zinf
from twins import LR, born, step


def test_states_of_another_optimizer_are_said_to_be_left_out(engine, tmp_path):
    model = born(engine)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    step(model, optimizer)
    with pytest.warns(UserWarning, match=r"left out the states of torch\.optim\.adam\.Adam: .*zinf\.AdamW"):
        engine.save(tmp_path / "one")
    assert (tmp_path / "one").is_dir()


def test_nothing_is_said_where_nothing_is_left_out(engine, tmp_path):
    model = born(engine)
    other = torch.nn.Linear(3, 3)
    torch.optim.SGD(model.parameters(), lr=LR).step()
    for optimizer in (zinf.AdamW(model.parameters(), lr=LR), torch.optim.SGD(model.parameters(), lr=LR)):
        step(model, optimizer)
    foreign = torch.optim.Adam(other.parameters())  # of no managed parameter
    other(torch.ones(3)).sum().backward()
    foreign.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save(tmp_path / "one")


def test_a_model_that_is_gone_is_not_saved_as_nothing(engine, tmp_path):
    model = born(engine)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    step(model, optimizer)
    del model
    with pytest.raises(RuntimeError, match=r"no model, so there is nothing to write.*kept in a variable"):
        engine.save(tmp_path / "one", extra={"epoch": 3})
    assert list(tmp_path.glob("one*")) == []


def test_an_engine_without_a_model_is_not_saved(engine, tmp_path):
    with pytest.raises(RuntimeError, match="nothing to write"):
        engine.save(tmp_path / "one")
    released = engine.release(born(engine))
    with pytest.raises(RuntimeError, match="nothing to write"):
        engine.save(tmp_path / "one")
    assert released[0].weight.isfinite().all()


def test_parameters_of_a_model_that_is_gone_are_said_to_be_left_out(engine, tmp_path):
    model, gone = born(engine), born(engine)
    optimizers = [zinf.AdamW(each.parameters(), lr=LR) for each in (model, gone)]
    for each, optimizer in zip((model, gone), optimizers, strict=True):
        step(each, optimizer)
    count = len(list(gone.parameters()))
    del gone, each
    with pytest.warns(UserWarning, match=f"left out {count} parameters that an optimizer updates"):
        engine.save(tmp_path / "one")
