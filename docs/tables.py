"""Fill the speed tables of the READMEs from committed measurements; `--check` only fails where one is stale."""

import sys
from pathlib import Path

from tokenmix_core.testing import results

ROOT = Path(__file__).parent.parent


def main(check: bool) -> int:
    stale = 0
    for package in sorted((ROOT / "packages").iterdir()):
        tables = [results.markdown(path) for path in sorted((package / "benchmarks" / "results").glob("*.json"))]
        readme = package / "README.md"
        if not tables or not readme.exists():
            continue
        before = readme.read_text()
        if results.fill(readme, "\n\n".join(tables)):
            stale += 1
            print(f"{readme.relative_to(ROOT)}: {'stale' if check else 'rewritten'}")
            if check:
                readme.write_text(before)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
