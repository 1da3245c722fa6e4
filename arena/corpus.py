"""A corpus of source code and documentation, built from Debian packages: `python -m arena corpus`.

The stages extract texts, remove repeated text, hold out whole subsystems, train a vocabulary, and write tokens. Each
stage writes its files aside and renames them, so that a call that was stopped continues with the stage it was in.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from arena import packages
from arena.names import NAMES, find_names
from arena.spans import SPAN, Hashes, SpanSet, covered, without
from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core.data.prepare import prepare
from tokenmix_core.data.sources import Source
from tokenmix_core.data.text import SplitText
from tokenmix_core.data.token_file import DOCUMENTS, META, TOKENS, file_sha256
from tokenmix_core.data.tokenizer import BYTE_SPECIALS

MANIFEST, TOKENS_FOLDER, TOKENIZER = "manifest.json", "tokens", "tokenizer"
VOCABULARY = 16_384
# subsystems that are held out whole
HELD_OUT = (
    r"linux-source.*/linux-source-[\d.]+/(fs/btrfs|fs/xfs|kernel|mm|block|security|net/sctp|net/bluetooth)/",
    r"linux-source.*/linux-source-[\d.]+/Documentation/(filesystems|networking|scheduler|mm)/",
    r"python3[^/]*-doc/.*/_sources/(howto|tutorial)/",
    r"rust-doc/.*/html/book/",
    r"libpython3[^/]*/.*/(asyncio|email|unittest)/",
)
# windows of so many bytes of whole lines that occurred before are removed
REPEATED = 160
# of the text of held-out documents, and of the spans in it that may occur in training
LEAST_HELD_OUT_BYTES, MOST_LEAKED = 5_000_000, 0.005
# a document that loses more of its bytes is left out
_MOST_REMOVED = 0.5
_LEAST_BYTES = 256
_TOKENIZER_BYTES = 80_000_000
_SHUFFLE_SEED = 0
_EXTRACTED, _TEXT = "extracted", ("train.jsonl", "held_out.jsonl")
_PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Recipe(NamedTuple):
    """Choices that the corpus depends on beside the packages.

    Attributes:
        held_out: patterns of the names of held-out documents.
        vocabulary: tokens of the vocabulary, special ones included.
        least_held_out: bytes that must be held out.
    """

    held_out: tuple[str, ...] = HELD_OUT
    vocabulary: int = VOCABULARY
    least_held_out: int = LEAST_HELD_OUT_BYTES


DEFAULT = Recipe()


def build(
    folder: Path, sources: Path | None = None, recipe: Recipe = DEFAULT, *, progress: bool = True
) -> dict[str, Any]:
    """Build the corpus, or continue, and return its manifest.

    Args:
        folder: folder of the corpus: `tokens` (a token file), `tokenizer`, `names.json` and `manifest.json`.
        sources: a folder of .deb files; by default they are downloaded with apt into `packages` in the folder.
        recipe: further choices.
        progress: show progress bars.

    Raises:
        ValueError: the folder was begun from other packages, too little is held out, or held-out text occurs in
            training.
        OSError: a package cannot be downloaded or read.
    """
    if (folder / MANIFEST).is_file():
        return json.loads((folder / MANIFEST).read_text())
    if sources is None:
        packages.download(sources := folder / "packages")
    found = packages.packages_of(sources)
    folder.mkdir(parents=True, exist_ok=True)
    about = _begin(folder, found, recipe)
    stages = _Stages(folder, progress)
    for package in found:
        stages.extract(package)
    report = stages.clean(found, recipe)
    stages.train_tokenizer(recipe.vocabulary)
    tokenizer = folder / TOKENIZER
    meta = prepare(
        stages.source(about), folder / TOKENS_FOLDER, tokenizer=str(tokenizer), held_out=0.0, progress=progress
    )
    files = [f"{TOKENS_FOLDER}/{name}" for name in (TOKENS, DOCUMENTS, META)]
    files += [f"{TOKENIZER}/{path.name}" for path in sorted(tokenizer.iterdir())] + [NAMES]
    manifest = {
        **about,
        "tokens": meta.tokens,
        "documents": meta.documents,
        "held_out_tokens": meta.held_out_tokens,
        "held_out_documents": meta.held_out_documents,
        **report,
        "sha256": {name: file_sha256(folder / name) for name in files},
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    # can be made again from the packages
    shutil.rmtree(folder / _EXTRACTED, ignore_errors=True)
    for name in _TEXT:
        (folder / name).unlink(missing_ok=True)
    return manifest


def described(manifest: dict[str, Any]) -> str:
    """Return the counts of a corpus, as text."""
    training = manifest["tokens"] - manifest["held_out_tokens"]
    counts = "; ".join(f"{name} {count:,}" for name, count in manifest["counts"].items())
    return (
        f"{len(manifest['packages'])} packages; {training:,} tokens to train on, {manifest['held_out_tokens']:,} held "
        f"out; {manifest['leaked']:.3%} of the held-out spans of {SPAN} bytes occur in training "
        f"({manifest['leaked before']:.1%} before their lines were removed); {counts}"
    )


def _begin(folder: Path, found: Sequence[packages.Package], recipe: Recipe) -> dict[str, Any]:
    """Return what the corpus is made from; refuse a folder that was begun with something else."""
    listed = {f"{p.name} {p.version}": file_sha256(p.path) for p in found}
    about = json.loads(json.dumps({"packages": listed, "recipe": recipe._asdict()}))
    begun = folder / "begun.json"
    if begun.is_file() and json.loads(begun.read_text()) != about:
        raise ValueError(f"{folder} was begun from other packages or with another recipe; remove it or choose another")
    write_atomically(begun, json.dumps(about, indent=1) + "\n")
    return about


@contextmanager
def _written(path: Path) -> Iterator[IO[str]]:
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        yield file
    partial.replace(path)


def _lines(path: Path) -> Iterator[packages.Document]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield packages.Document(*json.loads(line))


class _Stages:
    """The stages up to the vocabulary; each returns at once if its files are there."""

    def __init__(self, folder: Path, progress: bool) -> None:
        self.folder, self.progress = folder, progress

    def _bar(self, items: Any, about: str, total: int | None = None) -> Any:
        return tqdm(items, desc=about, total=total, unit="doc", disable=not self.progress, mininterval=1.0)

    def _extracted(self, package: packages.Package) -> Path:
        return self.folder / _EXTRACTED / f"{package.name}.jsonl"

    def extract(self, package: packages.Package) -> None:
        """Write the texts of a package as JSON lines."""
        path = self._extracted(package)
        path.parent.mkdir(exist_ok=True)
        if not path.is_file():
            with _written(path) as file:
                for document in self._bar(packages.documents(package), package.name):
                    file.write(json.dumps(document, ensure_ascii=False) + "\n")

    def clean(self, found: Sequence[packages.Package], recipe: Recipe) -> dict[str, Any]:
        """Write the training text and the held-out text, without repeated text and text that occurs in both."""
        report = self.folder / "clean.json"
        if not report.is_file():
            counts: Counter[str] = Counter()
            wanted = re.compile("|".join(recipe.held_out))

            def documents(*, held_out: bool) -> Iterator[packages.Document]:
                for package in found:
                    for document in _lines(self._extracted(package)):
                        if bool(wanted.search(document.name)) == held_out:
                            yield document

            def everything() -> Iterator[tuple[packages.Document, bool]]:
                yield from ((d, False) for d in documents(held_out=False))
                yield from ((d, True) for d in documents(held_out=True))

            kept = self._without_repetitions(everything, counts)
            held_out = []
            with _written(self.folder / _TEXT[0]) as file:
                for document, held in kept:
                    if held:
                        held_out.append(document)
                    else:
                        counts["training documents"] += 1
                        counts["training bytes"] += len(document.text.encode())
                        file.write(json.dumps(document, ensure_ascii=False) + "\n")
            held_out, leaks = self._without_leaks(held_out)
            counts["held-out documents"] = len(held_out)
            counts["held-out bytes"] = size = sum(len(d.text.encode()) for d in held_out)
            with _written(self.folder / _TEXT[1]) as file:
                file.writelines(json.dumps(d, ensure_ascii=False) + "\n" for d in held_out)
            if size < recipe.least_held_out:
                raise ValueError(
                    f"only {size:,} bytes are held out, fewer than {recipe.least_held_out:,}; add packages"
                )
            if leaks["leaked"] > MOST_LEAKED:
                raise ValueError(
                    f"{leaks['leaked']:.2%} of the held-out spans of {SPAN} bytes occur in training, more than "
                    f"{MOST_LEAKED:.1%}"
                )
            names = find_names([d.text for d in held_out], self._bar(self._training(), "names"))
            write_atomically(self.folder / NAMES, json.dumps(names) + "\n")
            counts["names"] = len(names)
            write_atomically(report, json.dumps({"counts": dict(counts), **leaks}, indent=1) + "\n")
        return json.loads(report.read_text())

    def _training(self) -> Iterator[packages.Document]:
        return _lines(self.folder / _TEXT[0])

    def _without_repetitions(
        self, documents: Callable[[], Iterator[tuple[packages.Document, bool]]], counts: Counter[str]
    ) -> Iterator[tuple[packages.Document, bool]]:
        """Yield the documents without copies of documents and without windows of lines that occurred before."""
        seen: set[bytes] = set()
        copies: list[bool] = []
        hashes: list[np.ndarray] = []
        for document, _ in self._bar(documents(), "repetitions"):
            content = document.text.encode()
            digest = hashlib.blake2b(content, digest_size=16).digest()
            copies.append(digest in seen)
            seen.add(digest)
            if not copies[-1]:
                hashes.append(Hashes(content).windows(REPEATED)[0])
        ends = np.cumsum([len(h) for h in hashes])
        every = np.concatenate([*hashes, np.zeros(0, np.uint64)])
        del hashes, seen
        repeated = np.ones(len(every), bool)
        # the first of equal hashes stays
        repeated[np.unique(every, return_index=True)[1]] = False
        del every
        masks = iter(np.split(repeated, ends[:-1]))
        for (document, held), copy in zip(self._bar(documents(), "text", len(copies)), copies, strict=True):
            content = document.text.encode()
            counts["bytes before"] += len(content)
            if copy:
                counts["copied documents"] += 1
                continue
            mask, text = next(masks), Hashes(content)
            _, first, last = text.windows(REPEATED)
            kept = _cut(text, covered(len(text.line_ends()), first[mask], last[mask]))
            counts["repeated bytes"] += len(content) - len(kept)
            if kept:
                yield packages.Document(document.name, kept.decode()), held

    def _without_leaks(self, held_out: list[packages.Document]) -> tuple[list[packages.Document], dict[str, float]]:
        """Remove lines of held-out documents that share a span with training; return what is left and its leaks."""
        found = self._leaked([d.text.encode() for d in held_out], "leaks")
        kept = []
        for document, leaked in zip(held_out, found, strict=True):
            text = Hashes(document.text.encode())
            ends = text.line_ends()
            at = np.flatnonzero(leaked)
            first, last = (np.searchsorted(ends, edge, side="right") for edge in (at, at + SPAN - 1))
            if content := _cut(text, covered(len(ends), first, last)):
                kept.append(packages.Document(document.name, content.decode()))
        after = self._leaked([d.text.encode() for d in kept], "leaks again")
        return kept, {"leaked before": _share(found), "leaked": _share(after)}

    def _leaked(self, texts: Sequence[bytes], about: str) -> list[np.ndarray]:
        """Return for each text which of its spans occur in training."""
        spans = [Hashes(text).all_spans() for text in texts]
        members = SpanSet(spans)
        occurs = np.zeros(len(members), bool)
        for document in self._bar(self._training(), about):
            occurs[members.find(Hashes(document.text.encode()).all_spans())] = True
        return [occurs[np.searchsorted(members.hashes, each)] for each in spans]

    def train_tokenizer(self, vocabulary: int) -> None:
        """Train a byte-level BPE vocabulary on a sample of the training documents."""
        folder = self.folder / TOKENIZER
        if folder.is_dir():
            return
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        bpe = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(BYTE_SPECIALS.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=self.progress,
        )
        every = max(1, (self.folder / _TEXT[0]).stat().st_size // _TOKENIZER_BYTES)
        bpe.train_from_iterator((d.text for i, d in enumerate(self._training()) if i % every == 0), trainer)
        options = {"clean_up_tokenization_spaces": False, "split_special_tokens": True}
        partial = folder.with_name(f"{folder.name}.partial")
        PreTrainedTokenizerFast(tokenizer_object=bpe, **options, **BYTE_SPECIALS).save_pretrained(partial)
        partial.rename(folder)

    def source(self, about: dict[str, Any]) -> Source:
        """Return the texts as a source for `prepare`: shuffled training documents, then held-out ones in order."""
        starts = []
        for name, held_out in zip(_TEXT, (False, True), strict=True):
            offset, found = 0, []
            with (self.folder / name).open("rb") as file:
                for line in file:
                    found.append((name, offset, held_out))
                    offset += len(line)
            if not held_out:
                random.Random(_SHUFFLE_SEED).shuffle(found)
            starts += found

        def rows(skip: int) -> Iterator[SplitText]:
            files = {name: (self.folder / name).open("rb") for name in _TEXT}
            for name, offset, held_out in starts[skip:]:
                files[name].seek(offset)
                yield SplitText(json.loads(files[name].readline())[1], held_out=held_out)

        return Source({"corpus": "debian packages", **about}, rows, len(starts))


def _cut(text: Hashes, removed: np.ndarray) -> bytes:
    """Return a text without some lines; nothing if too little is left."""
    kept = without(text.data.tobytes(), text.line_ends(), removed)
    return kept if len(kept) >= max(_LEAST_BYTES, (1 - _MOST_REMOVED) * len(text.data)) else b""


def _share(marks: Sequence[np.ndarray]) -> float:
    return sum(int(m.sum()) for m in marks) / max(1, sum(map(len, marks)))
