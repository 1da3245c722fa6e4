"""Count words that docs/notation.md replaces by standard terms; fail if a word occurs more often than its limit.

    python tools/vocabulary.py [--show WORD] [--update] [PATH ...]

`vocabulary.toml` lists each word as a pattern, the terms to use instead, and the most occurrences allowed. A limit only
ever falls: `--update` lowers it to today's count. A line that needs the word is listed under `[[exception]]` with its
reason.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
CHECKED = ("*.py", "*.md", "*.c", "*.toml", "*.yml", "*.ipynb")
# results and fixtures are data, and the list itself contains every word
EXCLUDED = re.compile(r"/results/|/saved_at_|requirements\.lock|tools/vocabulary")


class Hit(NamedTuple):
    """One occurrence of a word in a file."""

    path: str
    line: int
    text: str


def files(paths: list[str]) -> list[str]:
    """Return the tracked files to check, relative to the repository, below the given paths or everywhere."""
    command = ["git", "ls-files", "--", *CHECKED]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    below = [Path(path).resolve().relative_to(ROOT).as_posix() for path in paths]
    chosen = [x for x in tracked if not below or any(x == b or x.startswith(f"{b}/") or b == "." for b in below)]
    return [x for x in chosen if not EXCLUDED.search(f"/{x}") and (ROOT / x).is_file()]


def occurrences(words: dict[str, dict[str, Any]], exceptions: list[dict[str, str]], paths: list[str]) -> dict:
    """Return the hits of each word, without the lines that an exception names."""
    patterns = {name: re.compile(word["pattern"]) for name, word in words.items()}
    allowed = defaultdict(list)
    for exception in exceptions:
        allowed[exception["file"], exception["word"]].append(exception["line"])
    hits: dict[str, list[Hit]] = {name: [] for name in words}
    for path in files(paths):
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1):
            for name, pattern in patterns.items():
                found = len(pattern.findall(line))
                if found and not any(text in line for text in allowed[path, name] + allowed["*", name]):
                    hits[name] += [Hit(path, number, line.strip())] * found
    return hits


def main() -> int:
    """Compare counts with limits; return the exit code."""
    parser = argparse.ArgumentParser(description="Count words that docs/notation.md replaces.")
    parser.add_argument("paths", nargs="*", help="files or folders; default: the whole repository")
    parser.add_argument("--show", action="append", default=[], metavar="WORD", help="print every line with this word")
    parser.add_argument("--update", action="store_true", help="lower the limits to today's counts")
    args = parser.parse_args()
    text = LIST.read_text(encoding="utf-8")
    listed = tomllib.loads(text)
    words = listed["word"]
    if unknown := set(args.show) - words.keys():
        parser.error(f"unknown word {sorted(unknown)[0]!r}; {LIST.name} lists {', '.join(words)}")
    hits = occurrences(words, listed.get("exception", []), args.paths)
    for name in args.show:
        for hit in hits[name]:
            print(f"{hit.path}:{hit.line}: {hit.text}")
    if args.paths:
        for name, found in sorted(hits.items(), key=lambda item: -len(item[1])):
            if found:
                print(f"{len(found):5d}  {name}: use {words[name]['use']}")
        return 0
    failed = False
    for name, word in words.items():
        count, limit = len(hits[name]), word["limit"]
        if count > limit:
            failed = True
            print(f"{name}: {count} occurrences, at most {limit} allowed; use {word['use']}", file=sys.stderr)
            print(f"  python tools/vocabulary.py --show '{name}'", file=sys.stderr)
        elif count < limit and args.update:
            block = re.compile(rf'(\[word\."?{re.escape(name)}"?\]\n(?:.+\n)*?limit = )\d+')
            text = block.sub(rf"\g<1>{count}", text)
    if args.update:
        LIST.write_text(text, encoding="utf-8")
    total = sum(map(len, hits.values()))
    print(f"{total} occurrences of {len(words)} listed words, limits {'exceeded' if failed else 'kept'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
