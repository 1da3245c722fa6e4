"""Get text from Debian packages: download them with apt, read files without unpacking, convert HTML to text."""

from __future__ import annotations

import gzip
import re
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

# patterns of package names; the newest of several packages that match a pattern is taken
PACKAGES = (
    r"linux-source-[\d.]+",
    r"python3\.\d+-doc",
    r"libpython3\.\d+-stdlib",
    r"rust-src",
    r"rust-doc",
    r"postgresql-doc-\d+",
    r"sqlite3-doc",
    r"git-doc",
    r"perl-doc",
    r"glibc-source",
    r"llvm-\d+-doc",
    r"emacs-el",
)
SOURCES = (
    *(".c", ".h", ".S", ".dts", ".dtsi", ".rs", ".py", ".pl", ".pm", ".sh", ".el", ".go", ".cc", ".cpp", ".java"),
    *(".js", ".yaml", ".pod", ".rst", ".txt", ".md", ".texi"),
)
_HTML = (".html", ".htm")
_ARCHIVES = (".tar", ".tar.gz", ".tar.xz", ".tar.bz2")
# names that are left out: generated tables of registers, HTML whose sources are in the package, and text that occurs
# elsewhere
_LEFT_OUT = re.compile(
    r"/drm/amd/include/|/python3[^/]*/html/(?!_sources/)|"
    r"/rust[^/]*/html/(core|alloc|src|implementors|unstable-book|test|proc_macro)/|changelog|ChangeLog|NEWS|copyright"
)
_LEAST_BYTES, _MOST_BYTES, _MOST_HTML_BYTES = 256, 2**20, 2**22
# also left out: files of at least _TABLE_BYTES in which more than these fractions of the lines are #defines (of
# registers), or of the characters digits
_TABLE_BYTES, _MOST_DEFINES, _MOST_DIGITS = 2**13, 0.4, 0.2


class Document(NamedTuple):
    """A text with its name, which consists of the package and the path inside it."""

    name: str
    text: str


class Package(NamedTuple):
    """A package file with its name and version."""

    path: Path
    name: str
    version: str


def download(folder: Path, patterns: Sequence[str] = PACKAGES) -> None:
    """Download with apt, for each pattern of names, the match with the highest number, unless `folder` has it.

    Raises:
        OSError: apt is not installed, or a download failed.
        ValueError: apt has no package that matches one of the patterns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = _output("apt-cache", "pkgnames").split()
    for pattern in tqdm(patterns, desc="packages", unit="package"):
        matches = [name for name in known if re.fullmatch(pattern, name)]
        if not matches:
            raise ValueError(f"apt knows no package {pattern}; run apt-get update, or name a folder with --packages")
        name = max(matches, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
        if not list(folder.glob(f"{name}_*.deb")):
            _output("apt-get", "download", "-qq", name, cwd=folder)


def packages_of(folder: Path) -> list[Package]:
    """Return the packages in `folder`, sorted by name.

    Raises:
        ValueError: the folder contains no package.
        OSError: a file is not a package, or dpkg-deb is not installed.
    """
    found = [
        Package(path, *_output("dpkg-deb", "--show", "--showformat=${Package} ${Version}", str(path)).split())
        for path in sorted(folder.glob("*.deb"))
    ]
    if not found:
        raise ValueError(f"{folder} holds no package; expected files that end in .deb")
    return sorted(found, key=lambda package: package[1:])


def _output(*command: str, cwd: Path | None = None) -> str:
    try:
        return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise OSError(f"{command[0]} is not installed; the corpus is built on Debian or Ubuntu") from error
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error


def documents(package: Package) -> Iterator[Document]:
    """Yield the texts of a package, in the order of its files, without unpacking it to disk.

    Raises:
        OSError: the package is damaged.
    """
    command = ["dpkg-deb", "--fsys-tarfile", str(package.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield from _archive(process.stdout, package.name)
        except tarfile.TarError as error:
            raise OSError(f"{package.path} is damaged: {error}") from error
        finally:
            process.stdout.close()


def _archive(stream: IO[bytes], within: str) -> Iterator[Document]:
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            name = f"{within}/{member.name.removeprefix('./')}"
            file: Any = archive.extractfile(member) if member.isfile() else None
            if file is None or _LEFT_OUT.search(name):
                continue
            if name.endswith(_ARCHIVES):
                yield from _archive(file, name)
            elif (text := _text(name, member.size, file)) is not None:
                yield Document(name, text)


def _text(name: str, size: int, file: IO[bytes]) -> str | None:
    """Return the text of a file, or None if it has no text to train on."""
    plain, html = name.removesuffix(".gz"), False
    if plain.endswith(_HTML):
        html = True
    elif not plain.endswith(SOURCES):
        return None
    if not _LEAST_BYTES <= size <= _MOST_HTML_BYTES:
        return None
    content = file.read()
    try:
        text = (gzip.decompress(content) if plain != name else content).decode()
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError):
        return None
    text = html_text(text) if html else text.replace("\r\n", "\n")
    return text if _LEAST_BYTES <= len(text) <= _MOST_BYTES and not _is_table(text) else None


def _is_table(text: str) -> bool:
    if "\0" in text:
        return True
    if len(text) < _TABLE_BYTES:
        return False
    lines, sample = text.splitlines(), text[:: 1 + len(text) // 2**14]
    defines = sum(line.startswith("#define") for line in lines)
    return defines > _MOST_DEFINES * len(lines) or sum(map(str.isdigit, sample)) > _MOST_DIGITS * len(sample)


class _Reader(HTMLParser):
    """Collects the text of a page: one line for each block element; lines inside `pre` are kept."""

    _HIDDEN = frozenset(("script", "style", "head", "nav", "noscript", "svg", "button", "form"))
    _BLOCKS = frozenset(
        (
            *("p", "div", "br", "tr", "li", "dt", "dd", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "table", "ul", "ol"),
            *("dl", "section", "article", "header", "footer", "blockquote", "hr", "details", "summary"),
        )
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = self._literal = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in self._HIDDEN
        self._literal += tag == "pre"
        if tag in self._BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in self._HIDDEN))
        self._literal = max(0, self._literal - (tag == "pre"))
        if tag in self._BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._literal else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """Return the text of an HTML page."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    lines = "".join(reader.parts).splitlines()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip() + "\n"
