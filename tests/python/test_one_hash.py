"""One hash: wherever the states live, training gives plain PyTorch's bits."""

import itertools

import pytest
import zinf
from conftest import process_io
from models import CASES

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

from training import (
    LR,
    PLACEMENTS,
    STEPS,
    WEIGHT_DECAY,
    assert_same,
    build,
    outcome,
    plain_outcome,
    train,
)

ENTRIES = ["init", "adopt"]
ADOPTED_AND_EVICTED = {"mlp", "resnet", "lstm", "tied", "gpt2", "mixtral"}
AWAY_BYTES = 1 << 20  # of what lives on NVMe, so much may be in memory unused
ONLY_FULL = {"gpt2-compile"}  # compiling takes half a minute


def quick(index, name, placement, entry, audit):
    """The subset that CI runs: every model in the harshest placement and in one other."""
    others = [other for other in PLACEMENTS if other != "evict"]
    if name in ONLY_FULL or audit != audited(index, placement, entry):
        return False
    if placement == "evict":
        return entry == "init" or name in ADOPTED_AND_EVICTED
    return entry == "adopt" and placement == others[index % len(others)]


def audited(index, placement, entry):
    """Every second one of the quick cases, never those that need raw pointers."""
    turn = index + list(PLACEMENTS).index(placement) + ENTRIES.index(entry)
    return turn % 2 == 0 and not list(CASES.values())[index].raw_access


def matrix():
    for index, (name, case) in enumerate(CASES.items()):
        for placement, entry, audit in itertools.product(PLACEMENTS, ENTRIES, [False, True]):
            if audit and case.raw_access:
                continue
            marks = [] if quick(index, name, placement, entry, audit) else [pytest.mark.full]
            label = f"{name}-{placement}-{entry}" + ("-audit" if audit else "")
            yield pytest.param(name, placement, entry, audit, marks=marks, id=label)


def enter(engine, entry, case):
    if entry == "init":
        with engine.init():
            return build(case)
    model = build(case)
    engine.adopt(model)
    return model


def check_moved(case, placement, stats, read, written):
    """The least that /proc/self/io must show. Moments are twice a float32 weight, four times a narrow one."""
    if placement == "host":
        assert stats["bytes_read"] == stats["bytes_written"] == 0
        return
    weights = stats["weights_bytes"]
    states = weights * (4 if case.has_master else 2)
    away = states + (weights if placement == "nvme" else 0)
    if placement != "evict" and away <= AWAY_BYTES:
        return  # so much may stay in memory
    if placement == "states-nvme":
        least_read = least_written = states
    elif placement == "nvme":
        least_read, least_written = states, states + weights
    else:
        # Forward and update read a weight, the update writes it. Without a gradient
        # a unit is not updated: two branches of five are taken in the mean.
        steps = STEPS - 1 if case.loss_scale is None else STEPS // 2
        share = 1.0 if case.uses_all else 0.25
        least_read = least_written = int(share * steps * (states + weights))
    assert read >= least_read
    assert written >= least_written
    assert 0 < stats["bytes_read"] <= read
    assert 0 < stats["bytes_written"] <= written
    assert stats["reads"] > 0
    assert stats["writes"] > 0


@pytest.mark.parametrize(("name", "placement", "entry", "audit"), list(matrix()))
def test_same_bits_as_plain_pytorch(name, placement, entry, audit, nvme):
    case = CASES[name]
    plain = plain_outcome(name)
    read, written = process_io()
    with zinf.Engine(nvme=nvme, audit=audit, **PLACEMENTS[placement]) as engine:
        model = enter(engine, entry, case)
        optimizer = zinf.AdamW(
            model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=case.max_grad_norm
        )
        losses = train(case, model, optimizer, case.clip_norm)
        stats = engine.stats()
        moved = [after - before for after, before in zip(process_io(), (read, written), strict=True)]
        ours = outcome(losses, model, optimizer)
        last = engine.stats()

    assert_same(ours, plain)
    units = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    assert stats["managed"] >= len(units)
    assert stats["weights_bytes"] == sum(parameter.nbytes for parameter in model.parameters())
    assert stats["intercepted"] > 0
    check_moved(case, placement, stats, *moved)
    if placement == "evict":
        assert last["resident_bytes"] < stats["weights_bytes"]
        if case.peak_below_weights and entry == "init":  # an adopted model was all in memory once
            assert stats["peak_resident_bytes"] < stats["weights_bytes"]
    if audit:
        assert last["audit_violations"] == 0
        assert last["undeclared_writes"] == 0
