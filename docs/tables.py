"""Fill the tables of the READMEs and of docs from committed measurements; `--check` fails on stale ones.

Speeds go to the READMEs and docs/speed.md, training steps and their floors to docs/steps.md (`steps.py`), other
people's models to docs/field.md (`field.py`), what models were seen to do to docs/nha.md and docs/oryx.md (`seen.py`),
sentences that repeat measurements to the pages that `claims.py` names.

The rows of the sweeps over shapes stand in no table: they are plotted, and those slower than a peer are printed.
"""

import json
import sys
from pathlib import Path

import claims
import field
import goals
import seen
import steps

from tokenmix_core.testing import results

ROOT = Path(__file__).parent.parent


def measurements(folder: str) -> dict[Path, list[dict]]:
    """The rows of every package that has measurements in this folder of its benchmarks, by the package's folder."""
    packages = {}
    for package in sorted((ROOT / "packages").iterdir()):
        files = sorted((package / "benchmarks" / folder).glob("*.json"))
        if files:
            packages[package] = [row for path in files for row in json.loads(path.read_text())]
    return packages


def main(check: bool) -> int:
    packages = measurements("results")
    # by file and by what its marks say
    tables = {(package / "README.md", "speed"): results.markdown(rows) for package, rows in packages.items()}
    everything = [row for rows in packages.values() for row in rows]
    sweeps = [row for rows in measurements("results/sweep").values() for row in rows]
    if everything:
        tables[ROOT / "README.md", "speed"] = results.markdown(results.headlines(everything))
        tables[ROOT / "docs" / "speed.md", "speed"] = goals.table(everything, sweeps)
    for document, found in seen.tables().items():
        tables |= {(ROOT / "docs" / document, mark): table for mark, table in found.items()}
    tables |= {(ROOT / "docs" / "steps.md", mark): table for mark, table in steps.tables().items()}
    tables |= {(ROOT / "docs" / "field.md", mark): table for mark, table in field.tables().items()}
    tables |= claims.sentences()
    versions = [row for rows in measurements("results/versions").values() for row in rows]
    if versions:
        tables[ROOT / "docs" / "tritons.md", "speed"] = results.by_version(versions)
    stale = 0
    for (readme, mark), table in tables.items():
        before = readme.read_text()
        if results.fill(readme, table, mark):
            stale += 1
            print(f"{readme.relative_to(ROOT)}, {mark}: {'stale' if check else 'rewritten'}")
            if check:
                readme.write_text(before)
    if not check:
        seen.draw_plots()
    if everything and not check:
        results.plot(goals.of(everything), ROOT / "docs" / "plots" / "speed.png")
        results.plot(everything, ROOT / "docs" / "plots" / "shapes.png")
    if sweeps and not check:
        results.plot(sweeps, ROOT / "docs" / "plots" / "sweep.png", bound=goals.BOUND)
        for row, key in results.slower(sweeps, goals.BOUND):
            peer, name = row[f"{key}_peer"]
            print(f"{row['op']} · {row['shape']}: {key} {row[key]:.3f}, {name} {peer:.3f}: {row[key] / peer:.2f} times")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
