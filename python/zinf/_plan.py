"""What the model of an engine needs, and how fast it would train: `zinf plan` for a model that is there."""

from __future__ import annotations

import json
import math
import numbers
from typing import TYPE_CHECKING, Any

import torch

from zinf import _C

if TYPE_CHECKING:
    from zinf.engine import Engine


class Plan(dict):
    """What `zinf plan --json` prints, as a dictionary; print() shows the table."""

    def __init__(self, text: str, values: dict[str, Any]):
        super().__init__(values)
        self._text = text

    @property
    def fits(self) -> bool:
        """Of a sweep: whether any does."""
        return any(one["fits"] for one in self.get("sweep", [self]))

    def __str__(self) -> str:
        return self._text


def make(
    engine: Engine,
    cluster: str,
    precision: str | None,
    recompute: bool | None,
    tokens: float,
    what_if: str | None,
    changes: dict[str, Any],
) -> Plan:
    models = engine._roots()
    parameters = [
        (name if len(models) == 1 else f"model{index}.{name}", parameter)
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    ]
    if not parameters:
        raise ValueError("the engine manages no parameters yet: build a model in init(), or adopt() one")
    if cluster == "this" and any(parameter.device.type != "cpu" for _, parameter in parameters):
        raise ValueError(
            'the model is on a device, which "this" machine has none of in a plan: name a cluster'
        )
    if recompute is None:
        measured = changes.get("activation_bytes") is not None
        recompute = not (measured or (what_if or "").startswith("activation_bytes="))
    text, values = _C.plan(
        engine._manager,
        name=", ".join(type(model).__name__ for model in models),
        tensors=[(name, list(parameter.shape)) for name, parameter in parameters],
        cluster=str(cluster),
        changes=[(name, _text(value)) for name, value in changes.items() if value is not None],
        precision=precision or _precision(engine, [parameter for _, parameter in parameters]),
        recompute=bool(recompute),
        tokens=float(tokens),
        what_if=what_if or "",
    )
    return Plan(text, json.loads(values))


def _text(value: Any) -> str:
    """As the command line takes it: 24e9 is 24000000000."""
    if isinstance(value, numbers.Real) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)


def _precision(engine: Engine, parameters: list[torch.Tensor]) -> str:
    """That of most weights, with the masters that the optimizers keep of them."""
    counts: dict[torch.dtype, int] = {}
    for parameter in parameters:
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    most = max(counts, key=counts.__getitem__)
    if most.itemsize >= 4:
        return "fp32"
    split = all(optimizer.master == "split" for optimizer in engine._optimizers())
    return "bf16-split" if split and most == torch.bfloat16 else "bf16"
