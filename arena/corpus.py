"""Make a corpus of source code and documentation from Debian packages: `python -m arena corpus`.

The stages are: extract texts, remove repeated text, hold out whole subsystems, train a vocabulary, and write tokens. A
stage gives its files their names only when they are complete, so that a call after an interruption continues with the
unfinished stage.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from tokenmix_core.data.prepare import prepare, tokens_sha256
from tokenmix_core.data.sources import Source
from tokenmix_core.data.text import SplitText
from tokenmix_core.data.token_file import DOCUMENTS, META, TOKENS, file_sha256
from tokenmix_core.data.tokenizer import BYTE_SPECIALS

# name of the corpus in recipes and options, which leave out its folder; environment variable that has the folder
CORPUS, FOLDER = "corpus", "TOKENMIX_ARENA_CORPUS"
DEFAULT_FOLDER = Path("runs/corpus")
MANIFEST, TOKENS_FOLDER, TOKENIZER = "manifest.json", "tokens", "tokenizer"
VOCABULARY = 16_384
# regular expressions of document names: whole parts of packages, such as the kernel's fs/btrfs, are held out
HELD_OUT = (
    r"linux-source.*/linux-source-[\d.]+/(fs/btrfs|fs/xfs|kernel|mm|block|security|net/sctp|net/bluetooth)/",
    r"linux-source.*/linux-source-[\d.]+/Documentation/(filesystems|networking|scheduler|mm)/",
    r"python3[^/]*-doc/.*/_sources/(howto|tutorial)/",
    r"rust-doc/.*/html/book/",
    r"libpython3[^/]*/.*/(asyncio|email|unittest)/",
)
# minimum bytes of a window of whole lines that is removed if it has occurred before
REPEATED = 160
# minimum bytes of held-out text; maximum fraction of its spans that may occur in training text
LEAST_HELD_OUT_BYTES, MOST_LEAKED = 5_000_000, 0.005
# maximum fraction of a document that may be removed; above it, the whole document is left out
_MOST_REMOVED = 0.5
_LEAST_BYTES = 256
_TOKENIZER_BYTES = 80_000_000
_SHUFFLE_SEED = 0
_EXTRACTED, _CANDIDATES, _TEXT = "extracted", "candidates.jsonl", ("train.jsonl", "held_out.jsonl")
_PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Recipe(NamedTuple):
    """All choices that determine the corpus, besides the packages.

    Attributes:
        held_out: regular expressions of the names of held-out documents.
        vocabulary: size of the vocabulary, special tokens included.
        least_held_out: minimum number of bytes that must be held out.
    """

    held_out: tuple[str, ...] = HELD_OUT
    vocabulary: int = VOCABULARY
    least_held_out: int = LEAST_HELD_OUT_BYTES


DEFAULT = Recipe()


def build(
    folder: Path, sources: Path | None = None, recipe: Recipe = DEFAULT, *, progress: bool = True
) -> dict[str, Any]:
    """Build the corpus, or continue an interrupted build; return the manifest of the corpus.

    If `folder` has a manifest, the corpus is complete: the call returns the manifest without any check.

    Args:
        folder: folder of the corpus, for `tokens` (a token file), `tokenizer`, `names.json` and `manifest.json`.
        sources: folder of .deb files; by default they are downloaded with apt into `packages` below `folder`.
        recipe: all choices besides the packages.
        progress: whether to show progress bars.

    Raises:
        ValueError: the folder has an incomplete build from other packages or choices, too little text is held out, or
            too much held-out text occurs in the training text.
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
    vocabulary = folder / TOKENIZER
    meta = prepare(
        stages.source(about), folder / TOKENS_FOLDER, tokenizer=str(vocabulary), held_out=0.0, progress=progress
    )
    files = [f"{TOKENS_FOLDER}/{name}" for name in (TOKENS, DOCUMENTS, META)]
    files += [f"{TOKENIZER}/{path.name}" for path in sorted(vocabulary.iterdir())] + [NAMES]
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
    # remove the intermediate files, which can be made again from the packages
    shutil.rmtree(folder / _EXTRACTED, ignore_errors=True)
    for name in (*_TEXT, _CANDIDATES):
        (folder / name).unlink(missing_ok=True)
    return manifest


def folder() -> Path:
    """Return the folder of the corpus that runs use.

    Raises:
        ValueError: the folder contains no complete corpus.
    """
    found = Path(os.environ.get(FOLDER) or DEFAULT_FOLDER)
    if not (found / MANIFEST).is_file():
        raise ValueError(f"{found} holds no corpus; build it with `python -m arena corpus --out {found}`")
    return found


def tokens() -> Path:
    """Return the folder of the corpus's token file."""
    return folder() / TOKENS_FOLDER


def tokenizer() -> Path:
    """Return the folder of the corpus's tokenizer."""
    return folder() / TOKENIZER


def identity() -> dict[str, Any]:
    """Return values by which a result identifies the corpus: hashes of its tokens and of its manifest."""
    return {"text": CORPUS, "sha256": tokens_sha256(tokens()), "manifest": file_sha256(folder() / MANIFEST)}


def described(manifest: dict[str, Any]) -> str:
    """Return the counts in a corpus's manifest as one line of text."""
    training = manifest["tokens"] - manifest["held_out_tokens"]
    counts = "; ".join(f"{name} {count:,}" for name, count in manifest["counts"].items())
    return (
        f"{len(manifest['packages'])} packages; {training:,} tokens to train on, {manifest['held_out_tokens']:,} held "
        f"out; {manifest['leaked']:.3%} of the held-out spans of {SPAN} bytes occur in training "
        f"({manifest['leaked before']:.1%} before their lines were removed); {counts}"
    )


def _begin(folder: Path, found: Sequence[packages.Package], recipe: Recipe) -> dict[str, Any]:
    """Store packages and recipe in `folder` and return them as plain data.

    Raises:
        ValueError: a build in `folder` began with other ones.
    """
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
    """The stages up to the vocabulary; a stage whose files already exist returns at once."""

    def __init__(self, folder: Path, progress: bool) -> None:
        self.folder, self.progress = folder, progress

    def _progress(self, items: Any, about: str, total: int | None = None) -> Any:
        return tqdm(items, desc=about, total=total, unit="doc", disable=not self.progress, mininterval=1.0)

    def _extracted(self, package: packages.Package) -> Path:
        return self.folder / _EXTRACTED / f"{package.name}.jsonl"

    def extract(self, package: packages.Package) -> None:
        """Write the texts of a package to a file of JSON lines."""
        path = self._extracted(package)
        path.parent.mkdir(exist_ok=True)
        if not path.is_file():
            with _written(path) as file:
                for document in self._progress(packages.documents(package), package.name):
                    file.write(json.dumps(document, ensure_ascii=False) + "\n")

    def _once(self, name: str, stage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a stage and store its report; if the stage has been done, only return the stored report."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            write_atomically(path, json.dumps(stage(), indent=1) + "\n")
        return json.loads(path.read_text())

    def clean(self, found: Sequence[packages.Package], recipe: Recipe) -> dict[str, Any]:
        """Write training text and held-out text, without repetitions, and names in the latter; return counts and leaks.

        Held-out lines that share a span of bytes with the training text are left out.

        Raises:
            ValueError: too little text is held out, or too much of it still occurs in the training text.
        """
        counts = self._once("split", lambda: self._split(found, recipe))
        leaks = self._once("leaks", self._leaks)
        if (size := leaks.pop("held-out bytes")) < recipe.least_held_out:
            raise ValueError(f"only {size:,} bytes are held out, fewer than {recipe.least_held_out:,}; add packages")
        if leaks["leaked"] > MOST_LEAKED:
            raise ValueError(
                f"{leaks['leaked']:.2%} of the held-out spans of {SPAN} bytes occur in training, more than "
                f"{MOST_LEAKED:.1%}"
            )
        if not (self.folder / NAMES).is_file():
            texts = [document.text for document in _lines(self.folder / _TEXT[1])]
            names = find_names(texts, self._progress(self._training(), "names"))
            write_atomically(self.folder / NAMES, json.dumps(names) + "\n")
        counts |= {"held-out bytes": size, "names": len(json.loads((self.folder / NAMES).read_text()))}
        return {"counts": counts, **leaks}

    def _split(self, found: Sequence[packages.Package], recipe: Recipe) -> dict[str, int]:
        """Write training documents and candidates for held-out documents, without repetitions; return counts."""
        counts: Counter[str] = Counter()
        wanted = re.compile("|".join(recipe.held_out))

        def everything() -> Iterator[tuple[packages.Document, bool]]:
            for held_out in (False, True):
                for package in found:
                    for document in _lines(self._extracted(package)):
                        if bool(wanted.search(document.name)) == held_out:
                            yield document, held_out

        with _written(self.folder / _TEXT[0]) as train, _written(self.folder / _CANDIDATES) as candidates:
            for document, held_out in self._without_repetitions(everything, counts):
                if not held_out:
                    counts["training documents"] += 1
                    counts["training bytes"] += len(document.text.encode())
                (candidates if held_out else train).write(json.dumps(document, ensure_ascii=False) + "\n")
        return dict(counts)

    def _training(self) -> Iterator[packages.Document]:
        return _lines(self.folder / _TEXT[0])

    def _without_repetitions(
        self, documents: Callable[[], Iterator[tuple[packages.Document, bool]]], counts: Counter[str]
    ) -> Iterator[tuple[packages.Document, bool]]:
        """Yield the documents, except copies of earlier ones, and without windows of lines that occurred earlier.

        A document of which too little remains is left out.
        """
        seen: set[bytes] = set()
        copies: list[bool] = []
        hashes: list[np.ndarray] = []
        for document, _ in self._progress(documents(), "repetitions"):
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
        # keep the first of several equal hashes, which is no repetition
        repeated[np.unique(every, return_index=True)[1]] = False
        del every
        masks = iter(np.split(repeated, ends[:-1]))
        for (document, held), copy in zip(self._progress(documents(), "text", len(copies)), copies, strict=True):
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

    def _leaks(self) -> dict[str, float]:
        """Write the held-out documents without those lines that share a span of bytes with the training text.

        Return the fractions of spans that occur in the training text, before and after, and the bytes written.
        """
        candidates = list(_lines(self.folder / _CANDIDATES))
        spans = [Hashes(document.text.encode()).all_spans() for document in candidates]
        known = SpanSet(spans)
        occurs = self._occurring(known, "leaks")
        before = after = total = size = 0
        unknown: list[np.ndarray] = []
        with _written(self.folder / _TEXT[1]) as file:
            for document, each in zip(candidates, spans, strict=True):
                text = Hashes(document.text.encode())
                ends, leaked = text.line_ends(), np.flatnonzero(occurs[known.index(each)[0]])
                before += len(leaked)
                first, last = (np.searchsorted(ends, at, side="right") for at in (leaked, leaked + SPAN - 1))
                if content := _cut(text, covered(len(ends), first, last)):
                    kept = Hashes(content).all_spans()
                    index, members = known.index(kept)
                    after += int(occurs[index[members]].sum())
                    # these spans are new: the removal of lines has created them
                    unknown.append(kept[~members])
                    total, size = total + len(kept), size + len(content)
                    file.write(json.dumps((document.name, content.decode()), ensure_ascii=False) + "\n")
        new = SpanSet(unknown)
        again = self._occurring(new, "leaks again")
        after += sum(int(again[new.index(each)[0]].sum()) for each in unknown)
        shares = {"leaked before": before / max(1, sum(map(len, spans))), "leaked": after / max(1, total)}
        return {**shares, "held-out bytes": size}

    def _occurring(self, members: SpanSet, about: str) -> np.ndarray:
        """Return a mask of the members of a set of spans that occur in the training text."""
        occurs = np.zeros(len(members), bool)
        for document in self._progress(self._training(), about):
            occurs[members.find(Hashes(document.text.encode()).all_spans())] = True
        return occurs

    def train_tokenizer(self, vocabulary: int) -> None:
        """Train byte-level BPE on a sample of the training documents and save it, unless the folder has a tokenizer."""
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
        """Return the source of texts for `prepare`: training documents in random order, then held-out ones in order."""
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
    """Return a text without the removed lines; an empty text if too little remains."""
    kept = without(text.data.tobytes(), text.line_ends(), removed)
    return kept if len(kept) >= max(_LEAST_BYTES, (1 - _MOST_REMOVED) * len(text.data)) else b""
