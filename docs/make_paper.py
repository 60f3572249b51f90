"""Writes docs/paper.md and its plots from `zinf plan --paper` and `--beyond`.

python docs/make_paper.py path/to/zinf
"""

import json
import math
import pathlib
import subprocess
import sys

DOCS = pathlib.Path(__file__).parent
PAPER, OURS = "#9aa0a6", "#1a73e8"
COLOURS = ["#1a73e8", "#d93025", "#188038", "#f9ab00", "#9334e6"]
BARS = ["figure 6a", "figure 5a", "figure 5b", "figure 5c", "figure 6c", "figure 6d", "figure 6e"]

INTRO = """# The papers' tables and figures, and ours

Made by `python docs/make_paper.py path/to/zinf` from `zinf plan --paper --json` and `--beyond --json`.
Sources: ZeRO (2019), ZeRO-Infinity (2021) and its slides. "Ours" are the formulas and the simulator of
`src/plan`; every constant is in [src/plan/constants.h](../src/plan/constants.h), with where it comes from,
and is the same for all figures. How the simulator works and what it assumes: [plan.md](plan.md).

"paper" in the last column marks a printed value that contradicts the paper itself: it does not count.

![throughput, scaling and mechanisms: the paper's bars and ours](paper_speed.svg)

![figure 3: efficiency over bandwidth](paper_efficiency.svg)
"""

BEYOND = """# Beyond the paper

The same simulator, with zinf's own choices: gradients consumed in backward, split masters, activations on
NVMe, tiles, vertical micro-batches. These are projections, not measurements. "Projected" marks what the
engine does not have yet.
"""


def ask(zinf: str, what: str) -> dict:
    run = subprocess.run([zinf, "plan", what, "--json"], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def table_text(table: dict) -> str:
    lines = [f"## {table['id']}: {table['title']}", "", f"In {table['unit']}.", ""]
    lines += ["| | | paper | ours | difference |", "|---|---|---|---|---|"]
    notes = []
    for cell in table["cells"]:
        more = "> " if cell["more_than"] else ""
        difference = f"{100 * (cell['ours'] / cell['paper'] - 1):+.1f} %"
        if cell["paper_errs"]:
            difference = "paper"
        elif cell["more_than"] and cell["error"] == 0:
            difference = "holds"
        if cell["note"]:
            notes.append(f"- {cell['row']}, {cell['column']}: {cell['note']}.")
        values = [more + cell["printed"], number(cell["ours"]), difference]
        lines.append("| " + " | ".join([cell["row"], cell["column"], *values]) + " |")
    lines += ["", f"Mean error {100 * table['mean_error']:.1f} %, worst {100 * table['worst_error']:.1f} %."]
    if table["remark"]:
        lines += ["", table["remark"]]
    if notes:
        lines += ["", *notes]
    return "\n".join([*lines, ""])


def beyond_text(table: dict) -> str:
    lines = [f"## {table['title']}", "", "| " + " | ".join(table["header"]) + " |"]
    lines.append("|" + "---|" * len(table["header"]))
    lines += ["| " + " | ".join(row[name] for name in table["header"]) + " |" for row in table["rows"]]
    return "\n".join([*lines, "", table["remark"], ""])


class Svg:
    def __init__(self, width: int, height: int):
        self.size = (width, height)
        self.parts: list[str] = []

    def text(self, x, y, text, size=11, anchor="start", colour="#3c4043"):
        style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>')

    def bar(self, x, y, width, height, colour):
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
        )

    def path(self, points, colour):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')

    def save(self, path: pathlib.Path):
        width, height = self.size
        space = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"'
        head = f'<svg {space} viewBox="0 0 {width} {height}">'
        body = "\n".join(self.parts)
        path.write_text(f'{head}\n<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n')


def short(cell: dict) -> str:
    row = cell["row"].replace(" devices", "").replace("hidden ", "").replace("batch ", "")
    kind = {"ZeRO-Offload": " Off", "3D parallelism": " 3D"}.get(cell["column"], "")
    return row.replace("ZeRO-Infinity, ", "Inf ").replace(" parallelism", "").replace("ZeRO-", "Z-") + kind


def bars(svg: Svg, table: dict, left: float, top: float, width: float, height: float):
    cells = table["cells"]
    logarithmic = table["id"] == "figure 6a"
    most = max(max(cell["paper"], cell["ours"]) for cell in cells)

    def tall(value: float) -> float:
        if logarithmic:
            return height * math.log10(value) / math.log10(most)
        return height * value / most

    scale = ", logarithmic" if logarithmic else ""
    svg.text(left, top - 16, f"{table['id']}: {table['title']} ({table['unit']}{scale})", 12)
    step = width / len(cells)
    for i, cell in enumerate(cells):
        x = left + i * step
        for offset, value, colour in ((0.1, cell["paper"], PAPER), (0.47, cell["ours"], OURS)):
            svg.bar(x + offset * step, top + height - tall(value), 0.35 * step, tall(value), colour)
            svg.text(x + (offset + 0.17) * step, top + height - tall(value) - 2, number(value), 7, "middle")
        svg.text(x + 0.45 * step, top + height + 12, short(cell), 8, "middle")


def draw_speed(tables: dict[str, dict], path: pathlib.Path):
    width, height, rows = 460, 130, math.ceil(len(BARS) / 2)
    svg = Svg(2 * width + 60, rows * (height + 60) + 40)
    svg.bar(20, 10, 12, 12, PAPER)
    svg.text(36, 20, "paper")
    svg.bar(90, 10, 12, 12, OURS)
    svg.text(106, 20, "ours")
    for i, name in enumerate(BARS):
        bars(svg, tables[name], 20 + (i % 2) * (width + 20), 60 + (i // 2) * (height + 60), width, height)
    svg.save(path)


def draw_curves(curves: list[dict], path: pathlib.Path):
    states = list(dict.fromkeys(curve["state"] for curve in curves))
    width, height, top = 280, 200, 50
    svg = Svg(len(states) * (width + 50) + 20, height + 110)
    for i, state in enumerate(states):
        left = 40 + i * (width + 50)
        own = [curve for curve in curves if curve["state"] == state]
        rates = own[0]["bytes_per_second"]
        low, high = math.log10(rates[0]), math.log10(rates[-1])
        svg.text(left, 20, state, 12)
        for share in (0, 0.5, 1):
            y = top + height * (1 - share)
            svg.path([(left, y), (left + width, y)], "#dadce0")
            svg.text(left - 4, y + 3, f"{100 * share:.0f} %", 9, "end")
        for power in range(math.ceil(low), math.floor(high) + 1):
            x = left + width * (power - low) / (high - low)
            svg.text(x, top + height + 14, f"{10 ** (power - 9):g} GB/s", 9, "middle")
        for colour, curve in zip(COLOURS, own, strict=True):
            points = [
                (left + width * (math.log10(rate) - low) / (high - low), top + height * (1 - share))
                for rate, share in zip(rates, curve["efficiency"], strict=True)
            ]
            svg.path(points, colour)
        for j, (colour, curve) in enumerate(zip(COLOURS, own, strict=True)):
            svg.text(
                left + (j % 3) * 95, top + height + 32 + 14 * (j // 3), curve["label"], 10, colour=colour
            )
    svg.save(path)


def main():
    zinf = sys.argv[1] if len(sys.argv) > 1 else "zinf"
    paper = ask(zinf, "--paper")
    beyond = ask(zinf, "--beyond")
    tables = {table["id"]: table for table in paper["tables"]}
    simulated = [cell for table in paper["tables"] if table["simulated"] for cell in table["cells"]]
    mean = sum(cell["error"] for cell in simulated) / len(simulated)
    summary = f"Over all {len(simulated)} simulated cells the mean error is {100 * mean:.1f} %.\n"
    text = [INTRO, summary, *map(table_text, paper["tables"]), BEYOND, *map(beyond_text, beyond["tables"])]
    (DOCS / "paper.md").write_text("\n".join(text))
    draw_speed(tables, DOCS / "paper_speed.svg")
    draw_curves(paper["curves"], DOCS / "paper_efficiency.svg")


if __name__ == "__main__":
    main()
