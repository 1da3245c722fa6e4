"""Equations as the READMEs write them, in Unicode, turned into TeX for the site.

In a README an equation is an indented block that reads as it is in a terminal; code is fenced. One line of a block is
one line of the display, and wide gaps in it stay gaps.
"""

from __future__ import annotations

import re
import unicodedata
from html import escape

# words that are set upright as names; other words of three letters or more are prose
_NAMES = frozenset(
    re.findall(
        r"\w+",
        "away bias dbias delta diag Diag dlse dkeep dweight end exp exp2 far keep left local log logit lse max mean "
        "mixer mlp norm out scale sigmoid silu SiLU sinks softmax softplus unit until update weight window heads",
    )
)
_SHORT_PROSE = frozenset(["or", "of", "to", "is", "it", "on", "in", "by", "at", "an", "as"])
_SYMBOLS = {
    "−": "-",
    "·": r"\cdot",
    "⊙": r"\odot",
    "⊗": r"\otimes",
    "≤": r"\le",
    "≥": r"\ge",
    "≠": r"\ne",
    "≈": r"\approx",
    "∈": r"\in",
    "∪": r"\cup",
    "←": r"\leftarrow",
    "→": r"\rightarrow",
    "…": r"\ldots",
    "∞": r"\infty",
    "×": r"\times",
    "±": r"\pm",
    "∇": r"\nabla",
    "∂": r"\partial",
    "⌊": r"\lfloor",
    "⌋": r"\rfloor",
    "⟨": r"\langle",
    "⟩": r"\rangle",
    "{": r"\{",
    "}": r"\}",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
}
_BIG = {"Σ": r"\sum", "Π": r"\prod"}
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ˡⁿᵀ", [*"0123456789-+ln", r"\top"], strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_ACCENTS = {"\u0303": r"\tilde", "\u0302": r"\hat", "\u0304": r"\bar"}
_WIDE = re.compile(r"\s{3,}")
_BLOCK = re.compile(r"(?m)(?<=\n\n)(?: {4}.*\n)+")
_FENCE = re.compile(r"(?ms)^(```|~~~~).*?^\1[ \t]*$")


def with_equations(markdown: str) -> str:
    """A README with its equations as elements that the site typesets; their text stays inside, to be read and found."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_BLOCK.sub(_element, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _BLOCK.sub(_element, markdown[end:])])


def _element(block: re.Match[str]) -> str:
    lines = block[0].rstrip("\n").split("\n")
    return element("\n".join(line[4:] for line in lines)) + "\n"


def element(plain: str) -> str:
    """One equation, of one line or several, as HTML."""
    return f'<div class="equation" data-tex="{escape(tex(plain))}">{escape(plain)}</div>\n'


def tex(plain: str) -> str:
    """The TeX of an equation."""
    # an equals sign that stands below another is no gap
    rows = [_WIDE.split(re.sub(r"\s+=", " =", line.strip())) for line in plain.split("\n")]
    lines = [r" \qquad ".join(_Parser(cell).all() for cell in row) for row in rows]
    return r"\begin{aligned}" + r" \\ ".join(f"& {line}" for line in lines) + r"\end{aligned}"


def _joined(found: str) -> str:
    """TeX with its prose in one piece, and room around it."""
    found = re.sub(r"(\\text\{[^}]*\}) +a +(?=\\(?:text|operatorname))", r"\1 \\text{a} ", found)
    found = re.sub(r"(\\text\{[^}]*\}) +\\operatorname(\{\w+\})(?= *(?:[,.;:)]|\\text|$))", r"\1 \\text\2", found)
    found = re.sub(r" {2,}", " ", found)
    found = re.sub(r"\\text\{[^}]*\}(?: \\text\{[^}]*\})+", lambda run: run[0].replace(r"} \text{", " "), found)
    return re.sub(r"(\\text\{[^}]*\})", r"\\;\1\\;", found)


class _Parser:
    """Reads one cell from left to right."""

    def __init__(self, text: str) -> None:
        # an accent stands after its letter
        self.text, self.at = unicodedata.normalize("NFD", text.replace("`", "")), 0

    def all(self) -> str:
        parts: list[str] = []
        while self.at < len(self.text):
            parts.append(self._next())
        return _joined(" ".join(parts))

    def _next(self) -> str:
        char = self.text[self.at]
        if char.isspace():
            self.at += 1
            return ""
        if char == "√":
            self.at += 1
            return rf"\sqrt{{{self._next()}}}"
        word = re.compile(r"[A-Za-z]+2?(?:'s\b)?").match(self.text, self.at)
        if word and len(word[0]) > 1:
            return self._word(word[0])
        self.at += 1
        # a sign that is not known stands as it is
        known = char.isascii() or unicodedata.name(char, "").startswith("GREEK")
        base = _BIG.get(char, _SYMBOLS.get(char, char if known else rf"\text{{{char}}}"))
        if char.isalpha() or char in ")]}⟩⌋" or char in _BIG:
            return self._scripts(base)
        return base

    def _word(self, word: str) -> str:
        self.at += len(word)
        following = self.text[self.at : self.at + 1]
        if word in _NAMES or (len(word) > 2 and following in ("_", "^", "(", "[")):
            return self._scripts(rf"\operatorname{{{word}}}")
        if len(word) > 2 or word in _SHORT_PROSE:
            return rf"\text{{{word}}}"
        # letters side by side, such as the gradient dk; what follows belongs to the last
        self.at -= 1
        first, last = word[:-1], word[-1]
        self.at += 1
        return first + self._scripts(last)

    def _scripts(self, base: str) -> str:
        above: list[str] = []
        below: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _ACCENTS:
                base = f"{_ACCENTS[char]}{{{base}}}"
            elif char in "'′":
                above.append(r"\prime")
            elif char == "°":
                above.append(r"\circ")
            elif char in _SUPERSCRIPTS:
                above.append(_SUPERSCRIPTS[char])
            elif char in _SUBSCRIPTS:
                below.append(_SUBSCRIPTS[char])
            elif char in "_^" and self.at + 1 < len(self.text):
                (below if char == "_" else above).append(self._script())
                continue
            else:
                break
            self.at += 1
        return base + (f"_{{{' '.join(below)}}}" if below else "") + (f"^{{{' '.join(above)}}}" if above else "")

    def _script(self) -> str:
        """What stands behind _ or ^: a group in braces, or letters and digits."""
        self.at += 1
        if self.text[self.at] == "{":
            depth, start = 0, self.at
            while self.at < len(self.text):
                depth += {"{": 1, "}": -1}.get(self.text[self.at], 0)
                self.at += 1
                if not depth:
                    break
            return _Parser(self.text[start + 1 : self.at - 1]).all()
        run = re.compile(r"[^\W_]+").match(self.text, self.at)
        found = run[0] if run else self.text[self.at]
        # a superscript in Unicode belongs to the base
        found = re.split("[" + "".join(_SUPERSCRIPTS) + "]", found)[0] or found[0]
        self.at += len(found)
        return rf"\mathrm{{{found}}}" if found in _NAMES | _SHORT_PROSE else found
