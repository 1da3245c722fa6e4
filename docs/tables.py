"""Fill the READMEs' speed tables from committed measurements, and plot them; `--check` fails where one is stale."""

import json
import sys
from pathlib import Path

from tokenmix_core.testing import results

ROOT = Path(__file__).parent.parent


def measurements() -> dict[Path, list[dict]]:
    """The rows of every package that has measurements, by the package's folder."""
    packages = {}
    for package in sorted((ROOT / "packages").iterdir()):
        files = sorted((package / "benchmarks" / "results").glob("*.json"))
        if files:
            packages[package] = [row for path in files for row in json.loads(path.read_text())]
    return packages


def main(check: bool) -> int:
    packages = measurements()
    tables = {package / "README.md": results.markdown(rows) for package, rows in packages.items()}
    everything = [row for rows in packages.values() for row in rows]
    if everything:
        tables[ROOT / "README.md"] = results.markdown(results.headlines(everything))
    stale = 0
    for readme, table in tables.items():
        before = readme.read_text()
        if results.fill(readme, table):
            stale += 1
            print(f"{readme.relative_to(ROOT)}: {'stale' if check else 'rewritten'}")
            if check:
                readme.write_text(before)
    if everything and not check:
        results.plot(everything, ROOT / "docs" / "plots" / "speed.png")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
