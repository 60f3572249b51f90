"""The engine: where a model's parameters, gradients and optimizer states live."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import math
import numbers
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from zinf import _C, _addresses, _constructors, _faults, _higher_order, _readers, _writers, checkpoint
from zinf._plan import Plan
from zinf._plan import make as make_plan
from zinf._probe import measure
from zinf._ranks import SameRandom, end_rank, find_group, share_model
from zinf._states import joined

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from zinf.optim import AdamW

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # that are not closed
_engine_of_module = WeakIdKeyDictionary()  # which lives as long as the module
_with_ranks: set[Engine] = set()  # that are not closed: ranks must end together
_building: list[Engine] = []  # engines whose init() is entered, in any thread


class Engine:
    """Keeps a model's states where they fit, and brings them where they are used.

    host_memory: budget for states in host memory: bytes (4e9), or a text such as "4GB" or "512MiB".
    device_memory: budget for units on the accelerator, where there is one.
    nvme: a directory on a fast disk, or several; files there have no names and go with the process.
        "PATH:500GB" takes no more space than that. "{local_rank}" is replaced by the process's LOCAL_RANK.
    weights, states: "auto", "host" or "nvme": where weights (with their gradients) and optimizer states live.
    evict: "auto", or "always" to drop every unit after each use (for tests).
    audit: look for accesses that interception has missed; costs time.
    stage: where there are several ranks, what is split over them: 1 optimizer states, 2 gradients too,
        3 weights too. All ranks of torchrun take part, or those of `group`; the budgets are per process.
    partition_group: so many ranks in a row have the whole model among them, and such groups are replicas:
        more memory, but weights are gathered inside a group, such as a node. By default all are one group.
    deterministic: "ranks": the same bits for the same number of ranks. "world": for any power of two of them;
        with update="backward", without clipping, and where a step's micro-batch i is the one of rank i mod N
        in its pass i div N.
    nvme_endurance: bytes that the drives behind nvme are rated for (TBW), together, such as "600TB"; by
        default 0.3 of their size a day for 5 years. For stats() alone.

    Example:
        >>> engine = zinf.Engine(nvme="/mnt/nvme")
        >>> with engine.init():
        ...     model = torch.nn.Linear(1024, 1024)
        >>> optimizer = zinf.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.randn(8, 1024)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        host_memory: float | str | None = None,
        device_memory: float | str | None = None,
        nvme: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        weights: str = "auto",
        states: str = "auto",
        evict: str = "auto",
        audit: bool = False,
        nvme_endurance: float | str | None = None,
        stage: int = 3,
        group: ProcessGroup | None = None,
        partition_group: int | None = None,
        deterministic: str = "ranks",
    ):
        if _C.Manager.live():
            gc.collect()  # an older engine may wait for it, such as one of a notebook's cell that runs again
        _constructors.accept_managed()
        _addresses.tell_own()
        _writers.write_piece_by_piece()
        _readers.read_into_mapped_files(_smallest_budget)
        _higher_order.pass_over_keys()
        _faults.stay_first()
        _hook_registrations()
        self._manager = _C.Manager(
            host_memory=_size(host_memory, "host_memory"),
            device_memory=_size(device_memory, "device_memory"),
            nvme=_paths(nvme),
            weights=str(weights),
            states=str(states),
            evict=str(evict),
            audit=bool(audit),
            nvme_endurance=_size(nvme_endurance, "nvme_endurance"),
            group=find_group(group),
            stage=whole_number("stage", stage, "1, 2 or 3"),
            partition_group=_partition_group(partition_group),
            deterministic=str(deterministic),
        )
        self._closed = False

        self._stale = True  # there may be parameters that the models did not have before
        self._modules: list[weakref.ref[torch.nn.Module]] = []  # in the order of their coming
        self._released: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        _engines.add(self)
        if self._manager.ranks is not None:
            _with_ranks.add(self)

    def __repr__(self) -> str:
        if self._closed:
            return "zinf.Engine(closed)"
        stats = self.stats()
        limit, weights = (stats[name] / (1 << 20) for name in ("host_limit_bytes", "weights_bytes"))
        return (
            f"zinf.Engine(host_memory={limit:.1f} MiB, nvme={self._manager.nvme}, "
            f"{stats['managed']} units, {weights:.1f} MiB of weights)"
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._close_after(error)

    @contextlib.contextmanager
    def init(self) -> Iterator[None]:
        """Inside it, parameters go to their tier as they are created, with the same values as otherwise.

        Example:
            >>> with engine.init():
            ...     model = AnyModel(config)
        """
        self._check_open()
        with SameRandom(self._manager):
            self._manager.begin_init()
            _building.append(self)
            try:
                yield
            finally:
                _building.remove(self)
                self._manager.end_init()
                for model in self._roots():
                    self._adopt_parameters(model)
        self._manager.check_device_memory()

    def adopt(self, model: torch.nn.Module) -> torch.nn.Module:
        """Takes a model that exists already; returns it.

        A parameter whose memory somebody else uses too (a view, a numpy array) stays as it is
        until a later step finds it alone.
        """
        self._check_open()
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"adopt() takes a torch.nn.Module, not a {type(model).__name__}")
        self._take_over(model)
        for module in model.modules():
            self._released.discard(module)
        share_model(self._manager, model)
        self._note_module(model)
        self._adopt_parameters(model)
        self._manager.check_device_memory()
        return model

    def release(self, model: torch.nn.Module) -> torch.nn.Module:
        """Makes it a plain model again, in memory, with its gradients and optimizer states; returns it.

        The machine's memory is the limit, not host_memory. Raises when it does not fit; it is managed as
        before then.
        """
        parameters = list(model.parameters())
        if not any(_C.manager_of(parameter) is self._manager for parameter in parameters):
            raise ValueError(
                "this engine does not manage the model: it was never adopted, or released before"
            )
        states = [
            (parameter, state)
            for optimizer in self._optimizers()
            for parameter in parameters
            if (state := optimizer.state.get(parameter))
        ]
        try:
            for parameter, state in states:
                state.update(joined(parameter, state))
                for value in state.values():
                    _C.release(value)
            for parameter in parameters:
                if parameter.grad is not None:
                    _C.release(parameter.grad)
                _C.release(parameter)
        except RuntimeError:
            self._adopt_parameters(model)
            for parameter, state in states:
                for name, value in state.items():
                    if name != "step":
                        _C.adopt_state(parameter, value, name)
            raise
        self._let_go_of(model)
        return model

    def close(self, *, discard: bool = False) -> None:
        """Gives everything back: models are plain models again, the folders on NVMe are gone.

        The machine's memory is the limit, not host_memory. Where it is too little, BudgetError is raised and
        the engine is open as before.
        discard: nothing is given back; what was managed raises when it is touched afterwards.
        """
        self._close("discard" if discard else "keep all")

    def _close_after(self, error: BaseException) -> None:
        """Keeps what fits: the exception that is on its way is what matters."""
        try:
            self._close("keep what fits")
        except Exception as failure:
            error.add_note(f"zinf: {failure}")

    def _close(self, ending: str) -> None:
        if self._closed:
            return
        if self in _building:
            raise RuntimeError("close() inside init(): leave the `with engine.init():` block first")
        if _C.Probe.under_way() is not None:
            raise RuntimeError("close() inside probe(): call it when probe() has returned")
        try:
            self._manager.close(ending)
        finally:
            if self._manager.closed:
                self._note_closed()

    def _note_closed(self) -> None:
        self._closed = True
        _engines.discard(self)
        _with_ranks.discard(self)
        for known in self._modules:
            module = known()
            if module is not None and _engine_of_module.get(module) is self:
                del _engine_of_module[module]
        for model in self._roots():
            for parameter in model.parameters():
                if not _C.is_managed(parameter):
                    _C.release(parameter)

    def stats(self) -> dict[str, float]:
        """Counts, bytes and seconds so far, all of them numbers: see docs/python.md."""
        return self._manager.stats()

    def step_waits(self) -> list[tuple[str, float]]:
        """The five states that the last step has waited for longest, with seconds."""
        return self._manager.step_waits()

    def probe(self, step: Callable[[], Any]) -> _C.Need:
        """Runs a training step and says the least host_memory with which it works; nothing is trained.

        step: forward and backward, with or without the optimizer's step(). It may take more memory than
        host_memory, if the machine has it. Weights, optimizer states, gradients, buffers and the random
        states of torch on the CPU, Python and numpy are afterwards what they were. Only zinf.AdamW is held
        back: leave step() of another optimizer out, it changes weights, and the probe then raises.

        Example:
            >>> need = engine.probe(lambda: model(**batch).loss.backward())
            >>> need.least_bytes, need.fits
            (3221225472, True)
        """
        self._check_open()
        if self._manager.ranks is not None:
            raise RuntimeError("probe() measures one process: it does not work with several ranks yet")
        if not callable(step):
            raise TypeError(f"probe() takes a function that runs a step, not a {type(step).__name__}")
        return measure(self, step)

    def plan(
        self,
        batch: float = 1,
        seq: int | None = None,
        cluster: str = "this",
        *,
        precision: str | None = None,
        recompute: bool | None = None,
        tokens: float = 0,
        what_if: str | None = None,
        **changes: Any,
    ) -> Plan:
        """What fits where and how fast the engine's model would train, as `zinf plan` says it.

        batch, seq: samples per device and step, and tokens of a sample (1024).
        cluster: a built-in one such as "dgx-a100", or a JSON file; "this": this machine with the engine's
            budgets, measured in a few seconds.
        precision: "fp32", "bf16" or "bf16-split"; by default what the weights have.
        recompute: whether activations are computed again; False where activation_bytes is given.
        tokens: to train for: time and cost. what_if: a sweep, such as "device_memory=24GB,80GB".
        changes: what a sweep can change: device_memory, host_memory, nvme_bytes, nodes, micro_batches,
            activation_bytes, price and others (docs/plan.md).

        Example:
            >>> plan = engine.plan(batch=4, seq=256, cluster="dgx-a100", device_memory="24GB")
            >>> print(plan)  # a table
            >>> plan["fits"], plan["step_seconds"]
            (True, 0.0123)
        """
        self._check_open()
        if cluster == "this" and self._manager.ranks is not None:
            raise RuntimeError("plan() of this machine is for one process: name a cluster")
        changes = {"batch": batch, "seq": seq, **changes}
        return make_plan(self, cluster, precision, recompute, tokens, what_if, changes)

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Writes weights, buffers, states of zinf.AdamW, RNG states and `extra` to a new directory.

        A warning says what it leaves out: states of other optimizers, and parameters of a model that does
        not exist any more. Without any model it raises.

        extra: tensors, numbers, texts, None, numpy's numbers and arrays of numbers; lists, tuples and
        dictionaries of these.

        Example:
            >>> engine.save("run/step-100", extra={"epoch": 3})
        """
        self._check_open()
        models = self._roots()
        checkpoint.save(os.fspath(path), self._manager, models, self._optimizers(), extra)
        for what in self._left_out(models):
            warnings.warn(f"save() has left out {what}", stacklevel=2)

    def load(self, path: str | os.PathLike[str], only: str | None = None) -> tuple[int, Any]:
        """Brings back what save() has written, into the same models; returns (step, extra).

        only: "weights" for weights and buffers alone: optimizers and random states stay as they are, and
        need not be those that were saved.

        Example:
            >>> step, extra = engine.load("run/step-100")
            >>> engine.load("run/step-100", only="weights")  # to go on with another optimizer
        """
        self._check_open()
        if only not in (None, "weights"):
            raise ValueError(f'only is {only!r}, must be "weights" or None')
        load = checkpoint.load if only is None else checkpoint.load_weights
        failure = self._manager.heal()
        if failure and only == "weights":
            self._manager.abandon_updates()
            for optimizer in self._optimizers():
                optimizer._failure = optimizer._failure or failure  # its states may be of an older step
        try:
            return load(os.fspath(path), self._manager, self._roots(), self._optimizers())
        except BaseException:
            if failure:
                self._manager.fail(failure)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _note_module(self, module: torch.nn.Module) -> None:
        if all(known() is not module for known in self._modules):
            self._modules.append(weakref.ref(module))
        _engine_of_module[module] = self

    def _let_go_of(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            self._released.add(module)
            if _engine_of_module.get(module) is self:
                del _engine_of_module[module]

    def _take_over(self, model: torch.nn.Module) -> None:
        """What an older engine manages moves here, one parameter after the other."""
        theirs = [
            (name, parameter, manager)
            for name, parameter in model.named_parameters()
            if (manager := _C.manager_of(parameter)) not in (None, self._manager)
        ]
        if theirs and (self._manager.ranks is not None or any(each[2].ranks is not None for each in theirs)):
            raise ValueError(
                f"{theirs[0][0]} is managed by another engine, with ranks: release the model there first"
            )
        for name, parameter, manager in theirs:
            if (older := engine_of_manager(manager)) is not None:
                older._let_go_of(model)
            if parameter.grad is not None:
                _C.release(parameter.grad)
            _C.release(parameter)
            self._manager.adopt_parameters([(name, parameter)])

    def _roots(self) -> list[torch.nn.Module]:
        """The models: modules that are in no other, without those that were released."""
        modules = [module for known in self._modules if (module := known()) is not None]
        self._modules = [weakref.ref(module) for module in modules]
        children = {id(child) for module in modules for child in module.children()}
        return [module for module in modules if id(module) not in children and module not in self._released]

    def _optimizers(self) -> list[AdamW]:
        """The zinf optimizers over this engine's parameters, in the order of their making."""
        mine = {id(parameter) for model in self._roots() for parameter in model.parameters()}
        return [
            optimizer
            for optimizer in live_optimizers()
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        ]

    def _left_out(self, models: list[torch.nn.Module]) -> Iterator[str]:
        """What save() does not write of what this engine has trained."""
        for optimizer in _others:
            if _has_tensors(optimizer) and any(
                _C.manager_of(p) is self._manager for p in parameters_of(optimizer)
            ):
                name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
                yield (
                    f"the states of {name}: keep its state_dict() in a file of your own, or use zinf.AdamW, "
                    "whose states are saved"
                )
        kept = {id(parameter) for model in models for parameter in model.parameters()}
        trained = [p for optimizer in (*live_optimizers(), *_others) for p in parameters_of(optimizer)]
        lost = {id(p) for p in trained if id(p) not in kept and _C.manager_of(p) is self._manager}
        if lost:
            yield (
                f"{len(lost)} parameters that an optimizer updates but no model has: keep the model in a "
                "variable until save() has returned"
            )

    def _adopt_parameters(self, model: torch.nn.Module) -> bool:
        """False when one of them could not be taken."""
        named = {
            parameter: f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            if module not in self._released
            for name, parameter in module.named_parameters(recurse=False)
        }
        return self._manager.adopt_parameters([(name, parameter) for parameter, name in named.items()])

    def _refresh(self, all_managed: bool) -> None:
        """Between steps: what has come since, or could not be taken before."""
        if self._closed:
            return
        # With several ranks init() and adopt() alone split a parameter: all must have its values.
        if self._manager.ranks is None and (self._stale or not all_managed):
            self._stale = not all([self._adopt_parameters(model) for model in self._roots()])
        self._manager.adopt_offered()


_live: list[weakref.ref[AdamW]] = []  # zinf optimizers, in the order of their making
_others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have begun a step


def note_optimizer(optimizer: AdamW) -> None:
    _live[:] = [known for known in _live if known() not in (None, optimizer)]
    _live.append(weakref.ref(optimizer))


def live_optimizers() -> list[AdamW]:
    return [optimizer for known in _live if (optimizer := known()) is not None]


def open_engines() -> list[Engine]:
    return list(_engines)


def other_optimizers() -> list[torch.optim.Optimizer]:
    """Those that are not zinf's and have begun a step."""
    return list(_others)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_tensors(optimizer: torch.optim.Optimizer) -> bool:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return any(isinstance(value, torch.Tensor) for value in values)


def _smallest_budget() -> tuple[int, str | None]:
    """host_memory, and a directory on NVMe; (0, None) without an engine that has one."""
    return min(
        (
            (engine.stats()["host_limit_bytes"], path)
            for engine in _engines
            for path in engine._manager.nvme[:1]
        ),
        default=(0, None),
    )


def engine_of(tensor: torch.Tensor) -> Engine | None:
    """The engine that manages a tensor."""
    manager = _C.manager_of(tensor)
    return None if manager is None else engine_of_manager(manager)


def engine_of_manager(manager: _C.Manager) -> Engine | None:
    return next((engine for engine in _engines if engine._manager is manager), None)


def _size(value: float | str | None, name: str) -> str | None:
    """As C++ takes it: a text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f'{name} is {value!r}, must be a number of bytes or a text such as "4GB"')
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f'{name} is {value!r}, must be a whole number of bytes or a text such as "4GB"')
    return str(int(value))


def whole_number(name: str, value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} is {value!r}, must be {what}")
    return int(value)


def _partition_group(value: Any) -> int:
    """0: none."""
    number = 0 if value is None else whole_number("partition_group", value, "a number of ranks")
    if value is not None and number < 1:
        raise ValueError(f"partition_group is {value!r}, must be a number of ranks")
    return number


def _paths(nvme: Any) -> list[str]:
    if nvme is None:
        return []
    paths = [nvme] if isinstance(nvme, str | os.PathLike) else nvme
    try:
        return [os.fspath(path) for path in paths]
    except TypeError:
        raise ValueError(f"nvme is {nvme!r}, must be a path or several") from None


@functools.cache
def _hook_registrations() -> bool:
    def on_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        for engine in _engines:
            engine._stale = True
        for engine in _building:
            engine._note_module(module)
            if parameter is not None:
                engine._manager.adopt_parameter(parameter, f"{type(module).__name__}.{name}")

    def on_module(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        _refuse_replicas(module, child)
        for engine in _engines:
            engine._stale = True
        for engine in _building:
            engine._note_module(module)

    register_module_parameter_registration_hook(on_parameter)
    register_module_module_registration_hook(on_module)
    register_optimizer_step_pre_hook(_note_other)
    register_optimizer_step_post_hook(_count_step)
    return True


def _note_other(optimizer: torch.optim.Optimizer, *_: object) -> None:
    from zinf.optim import AdamW

    if _engines and not isinstance(optimizer, AdamW):
        _others.add(optimizer)


def _count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Of an optimizer of torch's, or somebody else's: steps are what plans are made of."""
    from zinf.optim import AdamW

    if not _engines or isinstance(optimizer, AdamW):  # which counts its own
        return
    for manager in _C.managers_of(parameters_of(optimizer)):
        if manager is not None and manager.ranks is None:
            manager.count_step()


def _refuse_replicas(module: torch.nn.Module, child: torch.nn.Module | None) -> None:
    replicas = isinstance(module, torch.nn.parallel.DistributedDataParallel)
    if replicas and child is not None and any(_C.is_split(p) for p in child.parameters()):
        raise RuntimeError(
            "DistributedDataParallel around a model that zinf splits over the ranks: zinf averages its "
            "gradients already, so train the model itself"
        )


@atexit.register
def _end_updates() -> None:
    # The process ends: nothing is brought back into memory.
    for manager in _C.Manager.live():
        if manager.ranks is not None:
            end_rank(manager.ranks)
        manager.wait_for_updates()
