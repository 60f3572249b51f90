"""The main table: zinf in three places beside plain PyTorch, alone or with fio beside it."""

import statistics

from context import Bench, Fresh, beside, warm
from load import Load
from pairs import Pairs, spread
from report import Section
from setting import GB, Need, Place, Setting
from watch import MIB, Used, Watched, Worker, WorkerError

COLUMNS = ("model, batch", "place", "reference s/step", "zinf s/step", "ratio", "target",
           "B per parameter and step (of the bound)", "peak GB (host_memory)", "plain's peak GB",
           "CPU s/step (reference)", "CPU of moves, s/GB (fio)", "request MiB",
           "CPU of updates, ns per parameter (plain)", "planning, of the time", "first step s (plain)",
           "losses", "others' CPU")  # fmt: skip

NOTE = """\
C: forward, backward and `torch.optim.AdamW(fused=True)` of plain PyTorch in RAM (bf16: `zinf.AdamW` \
without an engine, which has fp32 masters). O(b B): the same while fio moves b bytes per parameter and \
step; a step is done when its compute and its bytes are. Of a zinf step too all bytes are waited for. \
Ratios are medians (least-most) of interleaved pairs. Bytes are those of `/proc/PID/io`, peaks anonymous \
and shared memory, seen from outside; "first step" is from the start of the process to the end of its first \
step. With clipping, gradients wait for the norm: twice their bytes more, as they do not fit in memory. \
"Losses": whether they were plain PyTorch's, bit for bit. The CPU of moves is that of the threads that talk \
to the disk; "request" is the mean of what they gave it. "Others' CPU" is the share of the machine that \
neither side used, its host's and the kernel's part included: on a quiet machine a few %."""


def section(title: str) -> Section:
    return Section(title, NOTE, COLUMNS)


def measure(bench: Bench, table: Section, setting: Setting, place: Place) -> bool:
    """A row of the table; whether the losses were the same."""
    need = bench.need(setting.unclipped())
    arguments = place.arguments(need, bench.nvme)
    both = need.plain(), place.held(need)
    if bench.fit(*both) or bench.fit_in_turns(*both):
        plain = bench.plain(setting)
        turns = not bench.fit(*both)
        if turns:
            bench.say("the two have room in turns only: each gives memory back after its steps")
            plain.keep_small()
        with bench.zinf(setting, *arguments) as zinf:
            if turns:
                zinf.keep_small()
            return _compare(bench, table, setting, place, need, plain, zinf)
    if not bench.fit(need.plain()):
        raise WorkerError(f"plain PyTorch would need {need.plain().peak / GB:.0f} GB")
    bench.end_plain()
    bench.say("the two have no room side by side: each starts anew for every pair")
    with (Fresh(need.parameters, lambda: warm(Worker("--plain", *setting.arguments()))) as plain,
          Fresh(need.parameters, lambda: bench.zinf(setting, *arguments)) as zinf):  # fmt: skip
        return _compare(bench, table, setting, place, need, plain, zinf)


def _compare(bench: Bench, table: Section, setting: Setting, place: Place, need: Need,
             plain: Watched | Fresh, zinf: Watched | Fresh) -> bool:  # fmt: skip
    load = None
    if not place.bound():
        pairs = bench.interleave(plain.train, zinf.train)
    else:
        with bench.load(place, need) as load:
            pairs = bench.interleave(lambda steps: beside(plain, load, place, steps), zinf.train)
    same = all(a == b for a, b in zip(plain.losses, zinf.losses, strict=False))
    table.rows.append([
        str(setting), place.name, *_times(pairs, place), moved(pairs.candidate, need.parameters, place),
        f"{zinf.peak_bytes() / GB:.2f} ({place.budget(need) / GB:.2f})",
        f"{plain.peak_bytes() / GB:.2f}", _cpu(pairs), *_costs(plain, zinf, load, pairs),
        f"{zinf.first_seconds:.1f} ({plain.first_seconds:.1f})",
        "the same" if same else "OTHERS", others(pairs)])  # fmt: skip
    bench.say(f"ratio {spread(pairs.ratios())}")
    return same


def _times(pairs: Pairs, place: Place) -> list[str]:
    reference = f"{place.reference()} {_median(pairs.reference, Used.step):.2f}"
    verdict = "reached" if pairs.ratio() <= place.target else "missed"
    return [reference, f"{_median(pairs.candidate, Used.step):.2f}", spread(pairs.ratios(), 3),
            f"{place.target:.2f} {verdict}"]  # fmt: skip


def moved(results: list[Used], parameters: int, place: Place | None = None) -> str:
    read = statistics.median(used.bytes_read / used.steps for used in results) / parameters
    written = statistics.median(used.bytes_written / used.steps for used in results) / parameters
    least = place.bound() if place else 0
    bound = f" ({(read + written) / least:.2f} of {least})" if least else ""
    return f"{read:.1f} + {written:.1f}{bound}"


def _cpu(pairs: Pairs) -> str:
    return f"{_median(pairs.candidate, Used.cpu):.2f} ({_median(pairs.reference, Used.cpu):.2f})"


def _costs(plain: Watched | Fresh, zinf: Watched | Fresh, load: Load | None, pairs: Pairs) -> list[str]:
    """Per GB moved, per request, per parameter updated, and for planning."""
    of, theirs = zinf.costs, plain.costs
    moves = requests = "none"
    if load is not None and of["requests"]:
        moves = f"{of['move_seconds'] / of['moved'] * GB:.3f} ({load.cpu_seconds / load.bytes * GB:.3f})"
        requests = f"{of['moved'] / of['requests'] / MIB:.2f}"
    each = [1e9 * costs["update_seconds"] / costs["updated"] for costs in (of, theirs)]
    planning = of["plan_seconds"] / len(zinf.losses) / _median(pairs.candidate, Used.step)
    return [moves, requests, f"{each[0]:.2f} ({each[1]:.2f})", f"{planning:.2%}"]


def others(pairs: Pairs) -> str:
    return f"{statistics.median(pairs.others()):.0%}, at most {max(pairs.others()):.0%}"


def _median(results: list[Used], of) -> float:
    return statistics.median(map(of, results))


def tasks(bench: Bench, table: Section, settings: list[Setting], places: list[str]):
    """(name, what to do) of every row."""
    return [
        (f"{setting}, {place.name}", lambda s=setting, p=place: measure(bench, table, s, p))
        for setting in settings
        for place in map(setting.place, places)
    ]
