"""What interception costs: nanoseconds per call, and a GPT-2 step with everything resident.

    python bench/micro/intercept_bench.py [--pairs 15]

Plain and managed tensors in turn, one torch thread for the calls; medians of interleaved pairs with their
quartiles. The step is that of HF GPT-2 with 12 layers of width 64.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
import transformers
import zinf


def nanoseconds(call, repeats: int = 2000) -> float:
    begin = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - begin) / repeats


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def calls(weight, matrix, bias):
    x, rows = torch.randn(4), torch.randn(2, 8)
    return {
        "add": lambda: torch.add(x, weight),
        "mul_": lambda: x.mul_(weight),
        "t": lambda: matrix.t(),
        "view": lambda: matrix.view(64),
        "addmm": lambda: torch.addmm(bias, rows, matrix),
        "linear": lambda: F.linear(rows, matrix, bias),
    }


def measure_calls(engine, pairs: int) -> None:
    shapes = ((4,), (8, 8), (8,))
    plain = [torch.randn(shape) for shape in shapes]
    managed = [torch.nn.Parameter(tensor.clone(), requires_grad=False) for tensor in plain]
    engine.adopt(torch.nn.ParameterList(managed))
    ours, theirs = calls(*managed), calls(*plain)
    print("call        plain ns    managed ns   added ns per intercepted call")
    for name in theirs:
        before = engine.stats()["intercepted"]
        ours[name]()
        intercepted = engine.stats()["intercepted"] - before
        times = [(nanoseconds(theirs[name]), nanoseconds(ours[name])) for _ in range(pairs)]
        added = [(b - a) / intercepted for a, b in times]
        plain_ns, managed_ns = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:8s} {plain_ns:11.0f} {managed_ns:13.0f}   {quartiles(added)}, {intercepted} calls")
    x = torch.randn(4)
    alone = [nanoseconds(lambda: torch.add(x, x)) for _ in range(pairs)]
    print(f"add without managed arguments: {statistics.median(alone):.0f} ns with the engine")


def build():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=12, n_head=4, n_embd=64, vocab_size=97, n_positions=64, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def stepper(model, optimizer):
    tokens = torch.arange(64).reshape(2, 32) * 7 % 97

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        return time.perf_counter() - begin

    return step


def measure_steps(engine, pairs: int) -> None:
    plain, same, ours = build(), engine.adopt(build()), engine.adopt(build())
    steps = {
        "plain, torch fused AdamW": stepper(plain, torch.optim.AdamW(plain.parameters(), fused=True)),
        "managed, torch fused AdamW": stepper(same, torch.optim.AdamW(same.parameters(), fused=True)),
        "managed, zinf.AdamW": stepper(ours, zinf.AdamW(ours.parameters())),
    }
    for step in steps.values():
        for _ in range(3):
            step()
    rounds = [{name: step() for name, step in steps.items()} for _ in range(pairs)]
    base = [times["plain, torch fused AdamW"] for times in rounds]
    for name in steps:
        ratios = [times[name] / other for times, other in zip(rounds, base, strict=True)]
        ms = 1e3 * statistics.median(times[name] for times in rounds)
        print(f"{name:28s} {ms:7.2f} ms, {quartiles(ratios)} of plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with zinf.Engine(weights="host", states="host") as engine:
        with torch.no_grad():
            measure_calls(engine, args.pairs)
        measure_steps(engine, max(args.pairs, 41))


if __name__ == "__main__":
    main()
