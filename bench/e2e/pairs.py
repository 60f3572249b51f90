"""Ratios of interleaved pairs: now the reference, now the candidate, so that a slow minute meets both."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from watch import Used

Side = Callable[[int], Used]  # does so many steps


@dataclass
class Pairs:
    reference: list[Used] = field(default_factory=list)
    candidate: list[Used] = field(default_factory=list)

    def ratios(self) -> list[float]:
        return [b.step() / a.step() for a, b in zip(self.reference, self.candidate, strict=True)]

    def ratio(self) -> float:
        return statistics.median(self.ratios())

    def others(self) -> list[float]:
        """The machine's CPU that neither side used, as a share."""
        return [used.others() for used in (*self.reference, *self.candidate)]


def interleave(reference: Side, candidate: Side, count: int, steps: int, say: Callable[[str], None]) -> Pairs:
    pairs = Pairs()
    for index in range(count):
        say(f"pair {index + 1} of {count}, {steps} steps each")
        pairs.reference.append(reference(steps))
        pairs.candidate.append(candidate(steps))
    return pairs


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (least-most)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"
