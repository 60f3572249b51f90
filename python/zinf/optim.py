"""Optimizers that update managed parameters unit by unit."""

from __future__ import annotations

import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zinf import _C
from zinf._backward import BackwardUpdate
from zinf._ranks import check_all_split, check_slices, ranks_of, short_hash, slices_of
from zinf._states import NARROW, copied
from zinf.engine import engine_of_manager, note_optimizer, whole_number

_TYPES = (torch.float32, *NARROW)
_WRONG_TYPE = "zinf.AdamW takes float32, bfloat16 and float16"
_OPTIONS = ("max_grad_norm", "master", "update", "micro_batches", "_failure")  # in copies


class AdamW(torch.optim.Optimizer):
    """AdamW with the bits of torch.optim.AdamW(fused=True), wherever the states live.

    Weights in bfloat16 or float16 get a float32 master; an element that was edited outside the optimizer
    becomes its own master. On parameters without an engine it is a plain in-memory optimizer with the same
    arithmetic.

    max_grad_norm: clip as torch.nn.utils.clip_grad_norm_ does, to the bit for float32 gradients.
    update: "step": when step() is called. "backward": inside backward, as soon as a gradient is complete: it
        takes the least memory and time, and gradients are gone when backward returns (touching one raises).
    micro_batches: with update="backward", how many backward passes make one step.
    master: "split" keeps, of the master of a managed bfloat16 weight, only the 16 bits that the weight lacks;
        "plain" keeps all 32. The results are the same.

    Example:
        >>> optimizer = zinf.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler, which then gives its scale to step() instead of refusing float16 gradients."""
        if self._backward is not None:
            if self._any_used():
                self._fail("backward has updated weights with gradients of a scaled loss")
            raise RuntimeError(
                'GradScaler does not work with update="backward": use update="step"; if a backward of the '
                "scaled loss has run, weights are updated with scaled gradients: only engine.load() helps"
            )
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad and parameter.dtype not in _TYPES:
                self.param_groups.pop()
                raise ValueError(f"{_WRONG_TYPE}, not {parameter.dtype}: model.float() converts a model")
        if self._backward is not None:
            self._backward.watch(len(self.param_groups) - 1, self.param_groups[-1])

    def zero_grad(self, set_to_none: bool = True) -> None:
        begun = self._backward is not None and self._backward.begun()
        if begun and self._any_used():
            if not self._backward.interrupted():
                raise RuntimeError(
                    'zero_grad() before step(): with update="backward" weights are updated already, so the '
                    "step cannot be skipped: call step() first"
                )
            self._finish_step()
            begun = False
        super().zero_grad(set_to_none or self._backward is not None)
        if begun:
            self._forget_passes()

    def _finish_step(self) -> None:
        """Of a step whose step() an interrupt has prevented, with the options that it began with."""
        with _C.HeldInterrupts(), torch.no_grad():
            self._check_usable()
            self._step(self._backward.fixed_options([self._options(group) for group in self.param_groups]))

    def _forget_passes(self) -> None:
        """Those of the step that has begun."""
        self._backward.end_step()
        for ranks in ranks_of(self._parameters()):
            ranks.forget_sums()

    def _any_used(self) -> bool:
        return any(p.grad is not None and _C.is_consumed(p.grad) for p in self._parameters())

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
        update: str = "step",
        master: str = "split",
        micro_batches: int = 1,
    ):
        _C.check_adamw_options(
            lr=_number("lr", lr),
            betas=_two_numbers("betas", betas),
            eps=_number("eps", eps),
            weight_decay=_number("weight_decay", weight_decay),
            max_grad_norm=None if max_grad_norm is None else _number("max_grad_norm", max_grad_norm),
            update=str(update),
            master=str(master),
            micro_batches=whole_number("micro_batches", micro_batches, "a whole number"),
        )
        self.max_grad_norm = max_grad_norm
        self.master = master
        self.update = update
        self.micro_batches = micro_batches
        self._backward = BackwardUpdate(self, micro_batches) if update == "backward" else None
        self._failure: str | None = None  # of an update: weights and states do not fit together any more
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        note_optimizer(self)
        self._check_budget()

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        for group in packed["param_groups"]:
            group.setdefault("fused", True)  # torch's AdamW goes on with the same bits
        for index, parameter in enumerate(self._parameters()):
            if index in packed["state"]:
                packed["state"][index] = copied(parameter, packed["state"][index])
        kept = slices_of(self._parameters())
        return packed if kept is None else {**packed, "ranks": kept}

    def __getstate__(self) -> dict[str, Any]:
        states = {parameter: copied(parameter, state) for parameter, state in self.state.items()}
        options = {name: getattr(self, name) for name in _OPTIONS}
        return {**super().__getstate__(), "state": defaultdict(dict, states), **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "update" in state:  # of a copy: load_state_dict() comes here without
            self._backward = BackwardUpdate(self, self.micro_batches) if self.update == "backward" else None
        if self._backward is not None:
            for index, group in enumerate(self.param_groups):
                self._backward.watch(index, group)
        note_optimizer(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        given = [state_dict["state"].get(index) for index in saved]
        for group in state_dict["param_groups"]:
            _check_group(group)
        check_slices(self._parameters(), saved, state_dict)
        for parameter, state in zip(self._parameters(), given, strict=False):
            if state:
                _check_state(parameter, state)
        # Torch would cast the states to the weight's type; ours are float32 whatever that is.
        super().load_state_dict({**state_dict, "state": {}})
        self._failure = "load_state_dict() was not finished"
        for parameter, state in zip(self._parameters(), given, strict=True):
            if state:
                self._load_state(parameter, state)
        self._heal()

    def _load_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        device = _state_device(parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            self._set_state(parameter, name, state[name].detach().to(device, torch.float32, copy=True))
        if parameter.dtype in NARROW:
            self._set_master(parameter, state.get("master", parameter))  # none: of another optimizer
        self.state[parameter]["step"] = torch.tensor(float(state["step"]), dtype=torch.float32)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _hold_states(self, probe: _C.Probe) -> None:
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        fresh = [parameter for parameter in trained if not self.state.get(parameter)]
        probe.hold_states(fresh, split=self.master == "split")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # An exception between two weights would leave them of different steps; and one in no_grad() itself
        # would leave gradients off.
        with _C.HeldInterrupts(), torch.no_grad():
            self._check_usable()
            options = [self._options(group) for group in self.param_groups]
            if self._backward is not None:
                self._backward.check_options(options)
            self._step(options)
        return loss

    def _step(self, options: list[_C.AdamOptions]) -> None:
        probe = _C.Probe.under_way()
        if probe is not None:
            due = [parameter for parameter in self._parameters() if self._is_due(parameter)]
            fresh = [parameter for parameter in due if not self.state.get(parameter)]
            probe.step(due=due, fresh=fresh, split=self.master == "split")
            return
        ranks = ranks_of(self._parameters())
        if ranks:
            check_all_split([p for p in self._parameters() if p.grad is not None])
        self._refresh()
        try:
            for each in ranks:
                self._make_up(each)
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise
        if float(getattr(self, "found_inf", 0.0)):
            for each in ranks:
                each.count_step()
            return  # the scaler has found a gradient that is not finite
        scale = getattr(self, "grad_scale", None)
        inverse_scale = 1.0 if scale is None else 1.0 / float(scale)
        groups = [[p for p in group["params"] if self._is_due(p)] for group in self.param_groups]
        updated = [parameter for parameters in groups for parameter in parameters]
        self._prepare(updated)
        together = ranks if updated or self._backward is None else []
        # Other ranks count on a step from here on. Alone, nothing is changed before the first update.
        begun = bool(ranks)
        try:
            for each in together:
                each.begin_step(updated, self._how())
            clip = self._clip_factor(updated, inverse_scale, ranks)
            begun = True
            for parameters, its_options in zip(groups, options, strict=True):
                self._update(parameters, its_options, inverse_scale, clip, may_wait=True)
            for each in together:
                each.end_step(updated)
        except BaseException as error:
            why = str(error) or type(error).__name__
            if begun:
                self._failure = why
            for each in ranks:
                each.fail(why)
            raise
        if self._backward is not None:
            self._backward.end_step(updated)
        for each in ranks:
            each.count_step()
        for manager in _C.managers_of(self._parameters()):
            if manager is not None:
                manager.count_step()

    def _make_up(self, ranks: _C.Ranks) -> None:
        """Other ranks' backward passes may have had gradients where this one had none."""
        if self._backward is None:
            ranks.make_up_passes(1, None, self._how())
        else:
            update = None if self.max_grad_norm is not None else self._backward.update_deferred
            ranks.make_up_passes(self.micro_batches, update, self._how())

    def _how(self) -> str:
        """The options, in short: ranks compare them."""
        options: list[Any] = [self.max_grad_norm, self.update, self.micro_batches]
        for group in self.param_groups:
            numbers_of = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
            options += [float(number) for number in numbers_of]
        return f"lr={options[3]:g}, options {short_hash(options)}"

    def _is_due(self, parameter: torch.Tensor) -> bool:
        if parameter.grad is None:
            return False
        return self._backward is None or not _C.is_consumed(parameter.grad)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"weights and states do not fit together ({self._failure}): load a good state first, with "
                "engine.load() or load_state_dict()"
            )

    def _heal(self) -> None:
        """A good state was loaded."""
        self._failure = None
        if self._backward is not None:
            self._forget_passes()

    def _fail(self, why: str) -> None:
        """Neither this optimizer nor its engines are used again before a good state is loaded."""
        self._failure = why
        for manager in _C.managers_of(self._parameters()):
            if manager is not None:
                manager.fail(why)

    def _prepare(self, parameters: Sequence[torch.Tensor], check: bool = True) -> None:
        """Everything that can be refused, before anything is changed; budgets only with `check`."""
        if check and any(not self.state[parameter] for parameter in parameters):
            self._check_budget()
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            raise RuntimeError(
                "zinf.AdamW does not take sparse gradients: build the embedding with sparse=False"
            )
        for parameter in parameters:
            if parameter.dtype not in _TYPES:
                raise RuntimeError(f"{_WRONG_TYPE}, not {parameter.dtype}")
            state = self.state[parameter]
            if not state:
                self._make_state(parameter)
            elif state["exp_avg"].shape != _C.shard_of(parameter).shape:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} had another shape when its states were "
                    "made: give the optimizer a new parameter instead"
                )
            elif (parameter.dtype in NARROW) != ("master" in state):
                self._change_type(parameter, state)
            if state and state["exp_avg"].device.type not in ("cpu", parameter.device.type):
                self._bring_to_host(parameter, state)

    def _bring_to_host(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """States follow a weight that has left their device: model.cpu()."""
        for name in state.keys() & {"exp_avg", "exp_avg_sq", "master"}:
            self._set_state(parameter, name, state[name].detach().cpu())

    def _change_type(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """The weight has another type than before: model.float(), model.bfloat16()."""
        if parameter.dtype in NARROW:
            self._set_master(parameter, parameter)
        else:
            del state["master"]  # it is its own

    def _update(
        self,
        parameters: list[torch.Tensor],
        options: _C.AdamOptions,
        inverse_scale: float = 1.0,
        clip: float = 1.0,
        may_wait: bool = False,
    ) -> None:
        _C.adam_update_all(
            [(parameter, self.state[parameter]) for parameter in parameters],
            options,
            inverse_scale=inverse_scale,
            clip=clip,
            may_wait=may_wait,
        )

    @staticmethod
    def _options(group: dict[str, Any]) -> _C.AdamOptions:
        """Of a group, as numbers: what is none is refused before anything is changed."""
        beta1, beta2 = group["betas"]
        return _C.AdamOptions(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        )

    def _check_budget(self) -> None:
        """Refuses what could never work, before a weight is changed."""
        for manager in _C.managers_of(self._parameters()):
            if manager is None:
                continue
            mine = [parameter for parameter in self._parameters() if _C.manager_of(parameter) is manager]
            manager.check_training(
                parameters=mine,
                fresh=[parameter for parameter in mine if not self.state.get(parameter)],
                split=self.master == "split",
                waiting=self._backward is None or self.max_grad_norm is not None,
            )

    def _refresh(self) -> None:
        managers = _C.managers_of(self._parameters())
        for manager in managers:
            engine = engine_of_manager(manager)
            if engine is not None:
                engine._refresh(all_managed=None not in managers)
            elif manager is not None:
                manager.adopt_offered()

    def _clip_factor(
        self, parameters: list[torch.Tensor], inverse_scale: float, ranks: list[_C.Ranks]
    ) -> float:
        """What clip_grad_norm_ would multiply by: the same operations in the same order.

        With several ranks the norm is of all ranks' slices, summed in float64.
        """
        if self.max_grad_norm is None or not parameters:
            return 1.0
        if ranks:
            slices = [_C.shard_grad_of(parameter) for parameter in parameters]
            squares = sum(_C.sum_of_squares(grad) for grad in slices if grad is not None and grad.numel() > 0)
            norm = torch.tensor(ranks[0].sum_over_slices(float(squares)), dtype=torch.float64).sqrt()
            total = norm.to(torch.float32) * inverse_scale
        else:
            total = torch.nn.utils.get_total_norm([p.grad for p in parameters]) * inverse_scale
        return torch.clamp(self.max_grad_norm / (total + 1e-6), max=1.0).item()

    def _make_state(self, parameter: torch.Tensor) -> None:
        try:
            device = _state_device(parameter)
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[parameter][name] = _C.zeros_for(parameter, name, device)
            if parameter.dtype in NARROW:
                self._set_master(parameter, parameter)
            self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)
        except Exception:
            self.state.pop(parameter, None)  # all or nothing
            raise

    def _set_master(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        kept = _C.shard_of(parameter)
        own = value is parameter
        if self.master == "split" and _C.SplitMaster.possible(kept):
            master = _C.SplitMaster(kept)
            self.state[parameter]["master"] = master
            if not own:
                master.join(kept).copy_(value)
        else:
            value = kept if own else value
            device = self.state[parameter]["exp_avg"].device
            self._set_state(parameter, "master", value.detach().to(device, torch.float32, copy=True))

    def _set_state(self, parameter: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
        _C.adopt_state(parameter, tensor, name)
        self.state[parameter][name] = tensor


def _state_device(parameter: torch.Tensor) -> torch.device:
    """Beside the weight where the device's budget has room for that, else the CPU."""
    return parameter.device if _C.states_fit_beside(parameter) else torch.device("cpu")


def _check_group(group: dict[str, Any]) -> None:
    """Refuses the options of another optimizer that this one does not have."""
    missing = {"lr", "betas", "eps", "weight_decay"} - group.keys()
    if missing:
        raise ValueError(f"groups of another optimizer: they have no {sorted(missing)}")
    unknown = [name for name in ("amsgrad", "maximize") if group.get(name)]
    if unknown:
        raise ValueError(f"{unknown[0]} is on in these groups, but zinf.AdamW does not have it")


def _check_state(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Refuses what is no state of Adam for this parameter."""
    missing = {"exp_avg", "exp_avg_sq", "step"} - state.keys()
    if missing:
        raise ValueError(
            f"these are states of another optimizer: they have {sorted(state)}, not {sorted(missing)}"
        )
    expected = _C.shard_of(parameter).shape
    for name in state.keys() & {"exp_avg", "exp_avg_sq", "master"}:
        value = state[name]
        if not isinstance(value, torch.Tensor) or value.shape != expected:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{name} is {shape}, its parameter has shape {tuple(expected)}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, numbers.Real | torch.Tensor) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{name} is {value!r}, must be a number")


def _two_numbers(name: str, values: Any) -> tuple[float, float]:
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise ValueError(f"{name} is {values!r}, must be two numbers")
    return _number(name, values[0]), _number(name, values[1])
