"""Fill the tables of the READMEs and of docs from committed measurements; `--check` fails on stale ones.

`--without-models` leaves out the tables that are counted from models, which take most of the time.

Speeds go to the READMEs and docs/speed.md, training steps and their floors to docs/step_time.md (`step_time.py`),
third-party models to docs/integrations.md (`integrations.py`), measurements of trained models to the papers' pages in
docs (`model_results.py`), the size of mixers' states to docs/choose.md (`states.py`), and sentences that repeat
measurements to the pages that `claims.py` names.

The rows of the sweeps over shapes are in no table: the script plots them and prints those slower than a baseline.
"""

import sys
from pathlib import Path

import claims
import goals
import integrations
import model_results
import result_tables
import states
import step_time

ROOT = Path(__file__).parent.parent


def measurements(folder: str) -> dict[Path, list[dict]]:
    """Return the rows of all packages that have measurements in this folder of their benchmarks, by package folder."""
    packages = {}
    for package in sorted((ROOT / "packages").iterdir()):
        if rows := result_tables.rows_in(package / "benchmarks" / folder):
            packages[package] = rows
    return packages


def main(check: bool, models: bool = True) -> int:
    """Write or check all tables; without `models`, leave out those that are counted from models."""
    packages = measurements("results")
    # tables by file and by the text in their marks
    tables = {(package / "README.md", "speed"): result_tables.markdown(rows) for package, rows in packages.items()}
    everything = [row for rows in packages.values() for row in rows]
    sweeps = [row for rows in measurements("results/sweep").values() for row in rows]
    if everything:
        tables[ROOT / "docs" / "speed.md", "speed"] = goals.table(everything, sweeps)
    for document, found in model_results.tables().items():
        tables |= {(ROOT / "docs" / document, mark): table for mark, table in found.items()}
    tables |= {(ROOT / "docs" / "step_time.md", mark): table for mark, table in step_time.tables(models).items()}
    tables |= {(ROOT / "docs" / "integrations.md", mark): table for mark, table in integrations.tables().items()}
    tables |= {(ROOT / "docs" / "choose.md", mark): table for mark, table in states.tables(models).items()}
    tables |= claims.sentences()
    versions = [row for rows in measurements("results/versions").values() for row in rows]
    if versions:
        tables[ROOT / "docs" / "triton_versions.md", "speed"] = result_tables.by_version(versions)
    stale = 0
    for (readme, mark), table in tables.items():
        before = readme.read_text()
        if result_tables.fill(readme, table, mark):
            stale += 1
            print(f"{readme.relative_to(ROOT)}, {mark}: {'stale' if check else 'rewritten'}")
            if check:
                readme.write_text(before)
    if not check:
        model_results.draw_plots()
    if everything and not check:
        result_tables.plot(goals.of(everything), ROOT / "docs" / "plots" / "speed.png")
        result_tables.plot(everything, ROOT / "docs" / "plots" / "shapes.png")
    if sweeps and not check:
        result_tables.plot(sweeps, ROOT / "docs" / "plots" / "sweep.png", bound=goals.BOUND)
        for row, key in result_tables.slower(sweeps, goals.BOUND):
            baseline, name = row[f"{key}_baseline"]
            ratio = row[key] / baseline
            print(f"{row['op']} · {row['shape']}: {key} {row[key]:.3f}, {name} {baseline:.3f}: {ratio:.2f} times")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:], models="--without-models" not in sys.argv[1:]))
