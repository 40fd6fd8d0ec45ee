"""All benchmarks in one run, into one JSON file: what docs/performance.md shows.

    python tests/benchmarks/everything.py [--tiny] [--only burst idle] [-o figures.json]

It takes most of an hour on a machine of its own. A benchmark that fails is told, the others go on, and the exit code
is 1.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from figures import about, run, write

ALL = ("burst", "idle", "lateness", "claims", "tick", "slots", "gate")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that they work")
    parser.add_argument("--only", nargs="+", choices=ALL, default=ALL, help="these, in this order")
    parser.add_argument("-o", "--output", type=Path, help="write the figures there, as JSON, after each benchmark")
    given = parser.parse_args()
    report: dict[str, Any] = {**about(), "benchmarks": {}}
    failed = False
    for name in given.only:
        try:
            benchmark = importlib.import_module(name)
            sizes = {**benchmark.SIZES, **(benchmark.TINY if given.tiny else {})}
            report["benchmarks"][name] = run(benchmark.measure, sizes)
        except Exception:
            failed = True
            report["benchmarks"][name] = {"failed": traceback.format_exc()}
            traceback.print_exc()
        write(given.output, report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
