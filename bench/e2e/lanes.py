"""A picture of what the streams of the emulated device did: an SVG with a lane for each."""

from collections.abc import Sequence

WIDTH, LANE, LEFT = 900, 34, 110
COLORS = {"mm": "#4878a8", "to ": "#c98a3c"}
Span = tuple[str, int, int]  # name, begin and end in nanoseconds


def svg(lanes: Sequence[tuple[str, Sequence[Span]]], title: str) -> str:
    begin = min(span[1] for _, spans in lanes for span in spans)
    end = max(span[2] for _, spans in lanes for span in spans)
    height = 30 + LANE * len(lanes) + 30

    def place(time: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * (time - begin) / (end - begin)

    shapes = [f'<text x="10" y="18" font-weight="bold">{title}</text>']
    for number, (name, spans) in enumerate(lanes):
        top = 30 + LANE * number
        shapes.append(f'<text x="10" y="{top + 20}">{name}</text>')
        for label, first, last in spans:
            color = next((COLORS[key] for key in COLORS if key in label), "#9a9a9a")
            width = max(place(last) - place(first), 0.3)
            shapes.append(
                f'<rect x="{place(first):.1f}" y="{top + 4}" width="{width:.1f}" height="{LANE - 10}" '
                f'fill="{color}"><title>{label}</title></rect>'
            )
    bottom = 30 + LANE * len(lanes)
    for tenth in range(0, 11, 2):
        time = begin + (end - begin) * tenth // 10
        text = f"{(time - begin) / 1e6:.0f} ms"
        anchor = "end" if tenth == 10 else "middle"
        shapes.append(f'<text x="{place(time):.0f}" y="{bottom + 18}" text-anchor="{anchor}">{text}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(shapes)
        + "</svg>\n"
    )
