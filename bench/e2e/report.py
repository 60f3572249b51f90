"""The report of a benchmark: Markdown with the machine, the versions and tables."""

import datetime
import importlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass
class Section:
    title: str
    note: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join([f"## {self.title}", self.note, table, *self.after])


@dataclass
class Report:
    title: str
    out: str | None  # a file
    sections: list[Section] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def text(self) -> str:
        today = datetime.date.today()
        sections = [section.text() for section in self.sections if section.rows or section.after]
        head = [f"# {self.title} ({today})", machine(), f"`{command()}`", *self.remarks]
        head += [f"FAILED: {failure}" for failure in self.failures]
        return "\n\n".join(head + sections) + "\n"

    def write(self) -> None:
        """What there is so far."""
        if self.out:
            with open(self.out, "w") as file:
                file.write(self.text())


def command() -> str:
    return shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])


def cpu_name() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory_bytes(name: str = "MemTotal") -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields[name].split()[0]) * 1024


def machine() -> str:
    versions = [f"{name} {_version(name)}" for name in ("zinf", "torch", "transformers")]
    fio = _output("fio", "--version") if shutil.which("fio") else "no fio"
    return (
        f"{cpu_name()}, {os.cpu_count()} cores, {memory_bytes() / (1 << 30):.0f} GiB, Linux "
        f"{platform.release()}; Python {platform.python_version()}, {', '.join(versions)}, {fio}; "
        f"commit {_output('git', '-C', ROOT, 'rev-parse', '--short', 'HEAD') or 'unknown'}."
    )


def file_name(theme: str) -> str:
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(r\)|\(tm\)|amd|intel", "", cpu_name().lower()))
    return f"{theme}_{'-'.join(words[:3])}-{os.cpu_count()}-cores_{datetime.date.today()}.md"


def report_path(out: str | None, theme: str) -> str | None:
    """A file for the report: `out`, or a new one in it where that is a directory."""
    return os.path.join(out, file_name(theme)) if out and os.path.isdir(out) else out


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(importlib.import_module(package), "__version__", "unknown")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def plot(points: Sequence[tuple[float, float]], labels: tuple[str, str], path: str) -> str:
    """Markdown with the picture of a curve: a file beside the report with matplotlib, else bars of text."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        most = max(y for _, y in points)
        bars = [f"{x:10.2f} {y:8.2f} {'#' * round(50 * y / most)}" for x, y in points]
        return "\n".join(["```", f"{labels[0]:>10} {labels[1]:>8}", *bars, "```"])
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), marker="o")
    axes.set(xlabel=labels[0], ylabel=labels[1], ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path)
    return f"![{labels[1]} over {labels[0]}]({os.path.basename(path)})"
