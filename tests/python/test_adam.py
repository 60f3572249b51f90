"""zinf's Adam against torch itself, bit by bit."""

import re

import pytest
import torch
import zinf
from zinf import _C

SIZES = [1, 3, 7, 8, 9, 15, 16, 17, 33, 1000, 4096, 65_541]
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1.2e-38,
    1e-30,
    1e19,
    -1e20,
    3e38,
    -3e38,
    float("inf"),
    float("-inf"),
]


def bits(tensor):
    """Integers that are equal when the bits are; all NaNs are one."""
    tensor = tensor.detach().clone()
    tensor[tensor.isnan()] = float("nan")
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def assert_same(ours, theirs, what):
    differ = (bits(ours) != bits(theirs)).nonzero().flatten()
    assert (
        differ.numel() == 0
    ), f"{what}: {differ.numel()} of {ours.numel()} differ, first at {differ[:5].tolist()}"


def high_half(master):
    """To bf16 with ties away from zero; torch's own cast takes them to even."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def extreme(numel, generator):
    """Normal values of many magnitudes, with special ones strewn in."""
    values = torch.randn(numel, generator=generator)
    values *= 10.0 ** torch.randint(-30, 15, (numel,), generator=generator)
    special = torch.tensor(SPECIAL)
    chosen = special[torch.randint(len(SPECIAL), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.2, chosen, values)


class Ours:
    """A parameter with its states, updated by zinf."""

    def __init__(self, weight, pool=None):
        self.weight = weight.detach().clone()
        self.exp_avg = torch.zeros_like(self.weight)
        self.exp_avg_sq = torch.zeros_like(self.weight)
        self.step = 0
        self.pool = pool

    def update(self, grad, **options):
        self.step += 1
        return _C.adam_update(
            self.weight,
            grad,
            self.exp_avg,
            self.exp_avg_sq,
            step=self.step,
            pool=self.pool,
            **options,
        )


def compare(numel, *, kind="adamw", steps=10, values=torch.randn, pool=None, schedule=None, **hyper):
    """Runs torch's fused optimizer and ours side by side."""
    generator = torch.Generator().manual_seed(numel)
    theirs = torch.nn.Parameter(values(numel, generator=generator))
    ours = Ours(theirs, pool)
    cls = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    optimizer = cls([theirs], fused=True, **hyper)
    names = dict(hyper)
    names["beta1"], names["beta2"] = names.pop("betas", (0.9, 0.999))
    names.setdefault("weight_decay", 0.01 if kind == "adamw" else 0.0)
    for step in range(steps):
        grad = values(numel, generator=generator)
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = names["lr"] = schedule(step)
        theirs.grad = grad.clone()
        optimizer.step()
        ours.update(grad, decay="decoupled" if kind == "adamw" else "l2", **names)
        state = optimizer.state[theirs]
        assert_same(ours.exp_avg, state["exp_avg"], f"exp_avg, step {step}")
        assert_same(ours.exp_avg_sq, state["exp_avg_sq"], f"exp_avg_sq, step {step}")
        assert_same(ours.weight, theirs, f"weight, step {step}")


@pytest.mark.parametrize("kind", ["adamw", "adam"])
@pytest.mark.parametrize("numel", SIZES)
def test_equals_torch_for_every_size(kind, numel):
    compare(numel, kind=kind, steps=30, lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize("kind", ["adamw", "adam"])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.013, 1.0])
@pytest.mark.parametrize(
    "betas", [(0.9, 0.999), (0.5, 0.95), (0.49999, 0.9), (0.2, 0.5), (0.0, 0.0), (0.95, 0.0)]
)
def test_equals_torch_for_every_option(kind, maximize, weight_decay, betas):
    compare(10_007, kind=kind, maximize=maximize, weight_decay=weight_decay, betas=betas, lr=3e-3)


@pytest.mark.parametrize("kind", ["adamw", "adam"])
@pytest.mark.parametrize("eps", [0.0, 1e-45, 1e-30, 1e-8, 1.0])
@pytest.mark.parametrize("lr", [0.0, 1e-8, 1e-3, 10.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_on_extreme_values(kind, eps, lr, weight_decay):
    compare(20_011, kind=kind, values=extreme, eps=eps, lr=lr, weight_decay=weight_decay, steps=6)


def test_equals_torch_over_a_long_schedule():
    compare(777, steps=2_000, schedule=lambda step: 1e-3 * min(1.0, (step + 1) / 100) * 0.999**step)


def test_equals_torch_with_threads():
    compare(300_003, pool=_C.ThreadPool(3), steps=3)


# torch fuses 1 - lr * weight_decay: pairs where that shows in float32.
@pytest.mark.parametrize(
    ("lr", "weight_decay"),
    [
        (0.50218948258693008, 0.90131724275415004),
        (0.96644090059015064, 0.76791427663989698),
        (0.877851681063616, 0.8686024355803269),
    ],
)
def test_equals_torch_in_the_rounding_of_the_decay(lr, weight_decay):
    compare(100, lr=lr, weight_decay=weight_decay, steps=3)


def test_equals_torch_with_random_hyper_parameters():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        u = torch.rand(5, generator=generator, dtype=torch.float64).tolist()
        hyper = {
            "lr": 10 ** (-6 * u[0]),
            "betas": (u[1], 1 - 10 ** (-4 * u[2])),
            "eps": 10 ** (-12 * u[3]),
        }
        compare(203, kind="adam" if u[4] < 0.5 else "adamw", weight_decay=u[4] / 3, steps=4, **hyper)


def test_equals_torch_after_unscale_and_clip():
    generator = torch.Generator().manual_seed(1)
    numel, scale, max_norm = 5_003, 1024.0 * 3, 0.37
    theirs = torch.nn.Parameter(torch.randn(numel, generator=generator))
    ours = Ours(theirs)
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(5):
        grad = torch.randn(numel, generator=generator) * scale
        theirs.grad = grad.clone()
        scaler.scale(torch.zeros(1))
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_([theirs], max_norm)
        optimizer.step()
        scaler.update()
        inverse_scale = torch.tensor(scale).double().reciprocal().float().item()
        clip = torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()
        squares = ours.update(grad, lr=1e-2, inverse_scale=inverse_scale, clip=clip, sum_squares=True)
        assert squares**0.5 == pytest.approx(norm.item(), rel=1e-5)
        assert_same(ours.weight, theirs, "weight")


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [5, 4_099])
def test_narrow_weights_follow_an_fp32_master(dtype, grad_dtype, numel):
    generator = torch.Generator().manual_seed(2)
    theirs = torch.nn.Parameter(torch.randn(numel, generator=generator))
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, fused=True)
    ours = Ours(theirs)
    master, ours.weight = ours.weight, ours.weight.to(dtype)
    for _ in range(20):
        grad = torch.randn(numel, generator=generator).to(grad_dtype)
        theirs.grad = grad.float()
        optimizer.step()
        ours.update(grad, lr=1e-2, master=master)
        assert_same(master, theirs, "master")
        narrow = high_half(master) if dtype == torch.bfloat16 else master.to(dtype)
        assert_same(ours.weight, narrow, "weight")


def test_split_masters_are_plain_masters():
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(4_099, generator=generator)
    plain = Ours(master)
    plain.weight = high_half(master)
    split = Ours(master)
    split.weight = high_half(master)
    low = master.view(torch.int32).to(torch.int16).view(torch.uint16)
    for _ in range(20):
        grad = torch.randn(master.numel(), generator=generator).bfloat16()
        plain.update(grad, lr=1e-2, master=master)
        split.update(grad, lr=1e-2, low=low)
        assert_same(split.weight, plain.weight, "weight")
        joined = (split.weight.view(torch.int16).int() << 16) + low.view(torch.int16).int()
        assert_same(joined.view(torch.float32), master, "master")


def test_threads_change_no_bit_of_the_sum():
    grad = torch.randn(200_001).bfloat16()
    alone = _C.sum_of_squares(grad, inverse_scale=0.1)
    assert alone == pytest.approx((grad.double() * 0.1).square().sum().item(), rel=1e-6)
    for threads in (1, 2, 5):
        assert _C.sum_of_squares(grad, inverse_scale=0.1, pool=_C.ThreadPool(threads)) == alone


def test_flush_denormal_changes_no_bit():
    results = []
    for flush in (False, True):
        torch.manual_seed(0)
        ours = Ours(torch.randn(1000))
        grad = torch.randn(1000) * 1e-19
        torch.set_flush_denormal(flush)
        ours.update(grad)
        torch.set_flush_denormal(False)
        results.append(ours)
    assert results[0].exp_avg_sq.count_nonzero() > 0
    assert_same(results[0].exp_avg_sq, results[1].exp_avg_sq, "exp_avg_sq")


def misuse(**changes):
    tensors = {name: torch.zeros(8) for name in ("weight", "grad", "exp_avg", "exp_avg_sq")}
    arguments = {"step": 1, **tensors, **changes}
    positional = [arguments.pop(name) for name in tensors]
    return _C.adam_update(*positional, **arguments)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"grad": torch.zeros(9)}, "grad has 9 elements, the weight has 8"),
        ({"exp_avg": torch.zeros(8, dtype=torch.float64)}, "exp_avg must be Float, it is Double"),
        (
            {"weight": torch.zeros(8, dtype=torch.float64)},
            "weight must be float32, bfloat16 or float16",
        ),
        ({"weight": torch.zeros(16)[::2]}, "weight must be dense in memory"),
        ({"grad": torch.zeros(8, device="meta")}, "grad must be on the CPU, it is on meta"),
        ({"grad": torch.zeros(8).to_sparse()}, "grad must be dense"),
        ({"weight": torch.zeros(8).bfloat16()}, "bfloat16 weight needs master or low"),
        ({"master": torch.zeros(8)}, "its own master"),
        (
            {"weight": torch.zeros(8).half(), "low": torch.zeros(8, dtype=torch.uint16)},
            "float16 weight cannot be split",
        ),
        (
            {"weight": torch.zeros(8).bfloat16(), "low": torch.zeros(8, dtype=torch.int16)},
            "low must be UInt16",
        ),
        ({"step": 0}, "step is 0"),
        ({"lr": -1.0, "beta2": 1.0}, "lr is -1.*beta2 is 1"),
        ({"amsgrad": True}, "amsgrad is not supported"),
        ({"decay": "wrong"}, 'decay is "wrong"'),
    ],
)
def test_misuse_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        misuse(**changes)


def test_overlapping_tensors_are_refused():
    shared = torch.zeros(8)
    with pytest.raises(ValueError, match="exp_avg and exp_avg_sq overlap"):
        misuse(exp_avg=shared, exp_avg_sq=shared)
    with pytest.raises(ValueError, match="threads is 0"):
        _C.ThreadPool(0)


def test_empty_tensors_are_fine():
    empty = [torch.zeros(0) for _ in range(4)]
    assert _C.adam_update(*empty, step=1, sum_squares=True) == 0.0


def test_equals_torch_on_a_model_of_odd_sizes():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    ours = [Ours(p) for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(50):
        model(torch.randn(5, 13)).square().sum().backward()
        for one, p in zip(ours, model.parameters(), strict=True):
            one.update(p.grad.clone(), lr=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        for one, p in zip(ours, model.parameters(), strict=True):
            assert_same(one.weight, p, f"step {step}")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_grad_norm": "a"}, "max_grad_norm is 'a', must be a number"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0, must be positive"),
        ({"lr": None}, "lr is None, must be a number"),
        ({"lr": -1}, "lr is -1, must not be negative"),
        ({"betas": 0.9}, "betas is 0.9, must be two numbers"),
        ({"betas": (0.9, "b")}, "betas is 'b', must be a number"),
        ({"eps": True}, "eps is True, must be a number"),
        ({"micro_batches": 1.5}, "micro_batches is 1.5, must be a whole number"),
        ({"update": "sometimes"}, 'update is "sometimes", must be "step" or "backward"'),
    ],
    ids=lambda value: str(value),
)
def test_wrong_options_are_named(options, text):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
        zinf.AdamW([torch.nn.Parameter(torch.zeros(3))], **options)
