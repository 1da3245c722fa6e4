"""Draw `docs/plots/context_parallel.svg`: the schedule of two layers on four ranks, in both layouts.

    python tools/split_figure.py

Each rank has two rows, its compute stream and its NCCL stream, so that overlap shows. Widths are schematic.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

OUT = Path(__file__).parent.parent / "docs" / "plots" / "context_parallel.svg"
COMPUTE = {"fill": "#ddf4ff", "stroke": "#0969da"}
ATTEND = {"fill": "#ffebe9", "stroke": "#cf222e"}
SEND = {"fill": "#dafbe1", "stroke": "#1a7f37"}
LOCAL = {"fill": "#eaeef2", "stroke": "#57606a"}
IDLE = {"fill": "#ffffff", "stroke": "#8c959f", "stroke-dasharray": "3 3"}
LEFT, WIDTH, ROW, RANK_GAP = 118, 1080, 30, 12
# pixels of a wide character of 11.5 points, for the check that a text fits into its box
CHARACTER = 6.6


class Box(NamedTuple):
    """A box of a stream: its first and last pixel (right of the labels), its text and its colours."""

    start: float
    stop: float
    text: str
    style: dict[str, str]


def text(x: float, y: float, words: str, **style: str) -> str:
    """Return a text element."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(words)}</text>'


def draw(box: Box, y: float) -> list[str]:
    """Return the elements of a box.

    Raises:
        ValueError: the text is wider than the box.
    """
    width = box.stop - box.start
    if len(box.text) * CHARACTER > width:
        raise ValueError(f"{box.text!r} needs {len(box.text) * CHARACTER:.0f} pixels, the box has {width:.0f}")
    colours = " ".join(f'{name}="{value}"' for name, value in box.style.items())
    rect = f'<rect x="{LEFT + box.start:g}" y="{y:g}" width="{width:g}" height="{ROW - 4}" rx="3" {colours}/>'
    middle = LEFT + (box.start + box.stop) / 2
    return [rect, text(middle, y + 17, box.text, text_anchor="middle")] if box.text else [rect]


def recurrence(before: int, after: int) -> tuple[list[Box], list[Box]]:
    """Return the boxes of the convolution and the recurrence: those of the compute stream, and of the NCCL stream.

    `before` and `after` count the spans of the rank that have other spans before and after them.
    """
    compute = [
        Box(0, 60, "q k v", LOCAL),
        Box(126, 178, "conv", LOCAL),
        Box(182, 262, f"{before} × M, P", COMPUTE) if before else Box(182, 262, "", IDLE),
        Box(266, 346, f"{after} × L", COMPUTE) if after else Box(266, 346, "", IDLE),
        Box(416, 540, "outputs from S", COMPUTE),
    ]
    return compute, [Box(62, 124, "3 tokens", SEND), Box(266, 326, "M", SEND), Box(350, 412, "L", SEND)]


def attention(shares: list[float]) -> tuple[list[Box], list[Box]]:
    """Return the boxes of full attention in both streams; `shares` has the width in pixels of each group of heads."""
    begin = 560
    compute = [Box(begin, begin + 54, "q k v", LOCAL)]
    send = [Box(begin + 58, begin + 118, "K, V a", SEND), Box(begin + 122, begin + 182, "K, V b", SEND)]
    at = begin + 122
    for i, width in enumerate(shares):
        # the second group's keys must have arrived before
        at = max(at, begin + 186) if i else at
        compute.append(Box(at, at + width, f"heads {'ab'[i]}" if width > 48 else "ab"[i], ATTEND))
        at += width + 4
    return compute, send


def panel(top: float, title: str, works: list[float], cuts: list[int]) -> tuple[list[str], float]:
    """Return the elements of one layout's panel, and the y coordinate below it.

    `works` has each rank's width of attention in pixels, `cuts` the rank that owns each span of tokens.
    """
    lines = [text(12, top + 16, title, font_weight="bold", font_size="14")]
    y = top + 30
    cells = len(cuts)
    for i, owner in enumerate(cuts):
        width = (WIDTH - LEFT - 20) / cells
        x = LEFT + i * width
        lines.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="20" fill="#ffffff" stroke="#57606a"/>')
        lines.append(text(x + width / 2, y + 14, f"rank {owner}", text_anchor="middle"))
    lines.append(text(12, y + 14, "tokens 0 … T"))
    y += 34
    end = max(attention([work / 2] * 2)[0][-1].stop for work in works)
    for rank, work in enumerate(works):
        lines.append(text(12, y + 17, f"rank {rank}", font_weight="bold"))
        lines.append(text(62, y + 17, "compute", fill="#57606a"))
        lines.append(text(62, y + ROW + 17, "NCCL", fill="#57606a"))
        done, sent = recurrence(cuts[1:].count(rank), cuts[:-1].count(rank))
        attended, keys = attention([work / 2] * 2)
        if attended[-1].stop < end:
            attended.append(Box(attended[-1].stop + 4, end, "waits", IDLE))
        for box in [*done, *attended]:
            lines += draw(box, y)
        for box in [*sent, *keys]:
            lines += draw(box, y + ROW)
        y += 2 * ROW + RANK_GAP
    x = LEFT + end + 2
    lines.append(f'<path d="M{x:g} {top + 60:g} V{y - RANK_GAP:g}" stroke="#cf222e" stroke-dasharray="4 4"/>')
    lines.append(text(x - 4, y + 4, "the slowest rank ends", text_anchor="end", fill="#cf222e"))
    return lines, y + 22


def main() -> None:
    """Write the figure."""
    # work of causal attention on span i of n, proportional to i + 1/2, where 1 is the square of a span's length
    contiguous = [(rank + 0.5) * 62 for rank in range(4)]
    zigzag = [sum(contiguous) / 4] * 4
    lines, y = panel(10, "contiguous: one span per rank", contiguous, [0, 1, 2, 3])
    more, y = panel(y + 8, "zigzag: two spans per rank, equal work", zigzag, [0, 1, 2, 3, 3, 2, 1, 0])
    legend = [("local", LOCAL), ("recurrence", COMPUTE), ("attention", ATTEND), ("exchange", SEND), ("idle", IDLE)]
    for i, (words, style) in enumerate(legend):
        more += draw(Box(i * 110, i * 110 + 100, words, style), y)
    notes = [
        "M, L: how a span maps the state before it (S' = M S + L); P: outputs per unit of state. All M and L give S.",
        "K, V a: keys and values of the first group of heads, sent to all later spans. Widths are schematic.",
        "The backward pass runs from right to left; it gathers only gradients of states, as each rank keeps all M.",
    ]
    more += [text(12, y + 48 + 17 * i, note, fill="#57606a") for i, note in enumerate(notes)]
    height = y + 48 + 17 * len(notes)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11.5">',
        "<title>A recurrent and an attention layer on four ranks: computation and exchanges, in both layouts</title>",
        f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
    ]
    OUT.write_text("\n".join([*head, *lines, *more, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
