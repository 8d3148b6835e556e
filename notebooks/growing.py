"""Draw the picture at the head of each notebook: the engine, as far as the course has come, with the notebook's parts lit.

Parts of later notebooks are empty places. `python notebooks/header.py` writes the pictures to notebooks/pictures/, from the
`parts` of its table.
"""

from drawing import COLOURS, GREY, ORANGE
from header import NOTEBOOKS, alt_of, known_parts

PLAN = (  # the first row is the way of a token, and below are what its stations use
    "server | tokenizer | scheduler | batch | model | LM head | sampler | text",
    " | | drafts | block tables | KV cache | weights | grammar | stop rules",
    " | | | beams | kernels | devices | | ",
)
PLACES = {
    part.strip(): (column, row) for row, line in enumerate(PLAN) for column, part in enumerate(line.split("|")) if part.strip()
}
WIDTH, HEIGHT, ACROSS, DOWN = 82, 28, 96, 46  # of a box, and from a box to the next
STYLE = (
    f"{COLOURS}.drawing{{font:12px DejaVu Sans,Verdana,sans-serif;text-anchor:middle}}.drawing text{{fill:currentColor}}"
    f".drawing rect.known,.drawing path{{stroke:{GREY};fill:{GREY};fill-opacity:.12}}.drawing path{{fill:none}}"
    f".drawing .lit{{stroke:{ORANGE};stroke-width:2;fill:{ORANGE};fill-opacity:.3}}.drawing .later{{stroke:{GREY};"
    "stroke-dasharray:2 4;fill:none}"
)


def corner(part: str) -> tuple[int, int]:
    """The upper left corner of a part's box."""
    column, row = PLACES[part]
    return 7 + ACROSS * column, 30 + DOWN * row


def picture_of(stem: str) -> str:
    """The SVG of a notebook."""
    known = known_parts(stem)
    lines, boxes = [], []
    for part, (column, row) in PLACES.items():
        x, y = corner(part)
        kind = "lit" if part in NOTEBOOKS[stem].parts else "known" if part in known else "later"
        boxes.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>')
        if part not in known:
            continue
        boxes.append(f'<text x="{x + WIDTH // 2}" y="{y + 18}">{part}</text>')
        before = [other for other in known if PLACES[other] == ((column - 1, 0) if row == 0 else (column, row - 1))]
        if before and row == 0:
            lines.append(f"M{x - ACROSS + WIDTH} {y + HEIGHT // 2}H{x - 4}m-4-4l5 4l-5 4")
        elif before:
            lines.append(f"M{x + WIDTH // 2} {y}v{HEIGHT - DOWN}")
    if {"block tables", "KV cache"} <= {*known}:
        x, y = corner("KV cache")
        lines.append(f"M{x - ACROSS + WIDTH} {y + HEIGHT // 2}H{x}")
    if {"scheduler", "sampler"} <= {*known}:
        (start, y), (end, _) = corner("sampler"), corner("scheduler")
        lines.append(f"M{start + WIDTH // 2} {y}V14H{end + WIDTH // 2}V{y - 4}m-4-4l4 5l4-5")
        boxes.append(f'<text x="{(start + end + WIDTH) // 2}" y="11" font-size="11">the next step</text>')
    width, height = ACROSS * 8, 30 + DOWN * 3 - 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" aria-label="{alt_of(stem)}" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n<style>{STYLE}</style>\n'
        f'<rect class="paper" width="{width}" height="{height}"/>\n'
        f'<path d="{"".join(lines)}"/>\n' + "\n".join(boxes) + "\n</svg>\n"
    )
