"""Create the files of a new operation of core, which run and pass its test: `uvx nox -s new-op -- NAME`.

The files compute y = x ⊙ σ(gate) as an example. Replace the equation first, then reference, kernels and
test; CONTRIBUTING.md, "Add an operation", explains each file.
"""

from __future__ import annotations

import argparse
import keyword
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).with_name("new_op")


def main() -> None:
    """Create the files, export the public function and register it."""
    parser = argparse.ArgumentParser(description="Create the files of a new operation of core.")
    parser.add_argument("name", help="the public function, in snake_case")
    parser.add_argument("--package", type=Path, default=ROOT / "packages/core", help="folder with src/ and tests/")
    args = parser.parse_args()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", args.name) or keyword.iskeyword(args.name):
        parser.error(f"the name must be in snake_case, got {args.name!r}")
    ops, tests = args.package / "src/tokenmix_core/ops", args.package / "tests/ops"
    if (ops / args.name).exists():
        parser.error(f"{ops / args.name} exists")
    for template in sorted(TEMPLATES.iterdir()):
        is_test = template.name == "test_op.py.in"
        target = tests / f"test_{args.name}.py" if is_test else ops / args.name / template.name.removesuffix(".in")
        target.parent.mkdir(exist_ok=True)
        target.write_text(filled(template, args.name), encoding="utf-8")
        print(target)
    package, registry = ops / "__init__.py", ops / "registry.py"
    package.write_text(exported(with_import(package, args.name), args.name), encoding="utf-8")
    registry.write_text(with_import(registry, args.name) + REGISTRATION.replace("OP_NAME", args.name), encoding="utf-8")
    print(package, registry, sep="\n")


REGISTRATION = """register_operation(OP_NAME, {"x": "B T D", "gate": "B T D"}, {"B": 8, "T": 4096, "D": 2048})
"""


def filled(template: Path, name: str) -> str:
    """Return a template with the operation's name."""
    title = "".join(word.title() for word in name.split("_"))
    text = template.read_text(encoding="utf-8").replace("OP_NAME", name).replace("OP_TITLE", title)
    # sort imports again, because their order depends on the name
    return re.sub(
        r"(?m)(?:^from tokenmix_core\..*\n)+", lambda x: "".join(sorted(x[0].splitlines(keepends=True))), text
    )


def with_import(file: Path, name: str) -> str:
    """Return the text of a file that also imports the function, in the order of imports."""
    line = f"from tokenmix_core.ops.{name}.api import {name}\n"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    imports = [i for i, x in enumerate(lines) if x.startswith("from tokenmix_core.ops.")]
    following = (i for i in imports if lines[i].split()[1] > f"tokenmix_core.ops.{name}.api")
    after_last = next(i for i in range(imports[-1] + 1, len(lines)) if lines[i][0] not in " )")
    lines.insert(next(following, after_last), line)
    return "".join(lines)


def exported(text: str, name: str) -> str:
    """Return the text of a package whose `__all__` also has the function."""
    start = text.index("__all__ = [")
    names = re.findall(r'    "([a-z]\w*)",\n', text[start:])
    following = next((x for x in names if x > name), None)
    at = text.index(f'    "{following}",\n', start) if following else text.index("]", start)
    return f'{text[:at]}    "{name}",\n{text[at:]}'


if __name__ == "__main__":
    main()
