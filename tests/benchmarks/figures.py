"""What all benchmarks share: tables of figures, on the screen and as JSON, and functions in a Python of their own.

A benchmark is a file here with SIZES, TINY (sizes at which it only shows that it works) and ``measure(sizes)``, which
yields tables; ``command`` is its command line, and ``everything.py`` runs all of them. Importing this module makes the
helpers of the tests importable.

Nothing asserts anything about time, because a machine is not a test.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from rich.console import Console  # noqa: E402
from rich.table import Table as Grid  # noqa: E402

from celery_anarchon.cli.processes import clean_environment  # noqa: E402

PACKAGES = ("celery-anarchon", "celery", "kombu", "redis", "croniter", "celery-redbeat", "django-celery-beat")

Measure = Callable[[SimpleNamespace], Iterable["Table"]]


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """Rows of figures; a figure's name tells its unit. What a row lacks stays empty."""

    title: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, row: str, **figures: Any) -> None:
        """Figures of *row*; an underscore in a name is shown as a space."""
        self.rows.setdefault(row, {}).update({name.replace("_", " "): value for name, value in figures.items()})

    def ratio(self, into: Table, name: str, of: str, to: str, *, inverse: bool = False) -> None:
        """Column *name* of another table: figure *of* of each row over that of the row *to*, or the other way round."""
        base = self.rows.get(to, {}).get(of)
        for row, figures in self.rows.items():
            own = figures.get(of)
            if base and own:
                into.add(row, **{name: base / own if inverse else own / base})

    def show(self, console: Console) -> None:
        columns = dict.fromkeys(name for figures in self.rows.values() for name in figures)
        grid = Grid(title=self.title, title_justify="left")
        grid.add_column("")
        for name in columns:
            grid.add_column(name, justify="right")
        for row, figures in self.rows.items():
            grid.add_row(row, *(_text(figures.get(name)) for name in columns))
        console.print(grid)
        for note in self.notes:
            console.print(f"  {note}", highlight=False)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def about() -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load before": [round(load, 2) for load in os.getloadavg()],
        "versions": versions,
    }


def run(measure: Measure, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Measure, show each table as it comes, and return all of it as JSON has it."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    begin = time.perf_counter()
    tables = []
    for table in measure(SimpleNamespace(**sizes)):
        table.show(console)
        tables.append(asdict(table))
    return {"sizes": dict(sizes), "seconds": round(time.perf_counter() - begin, 1), "tables": tables}


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")


def command(text: str | None, sizes: Mapping[str, Any], tiny: Mapping[str, Any], measure: Measure) -> None:
    """The command line of one benchmark: an option for each size."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it works")
    parser.add_argument("-o", "--output", type=Path, help="write the figures there, as JSON")
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=type(value), help=f"default: {value}")
    given = vars(parser.parse_args())
    chosen = {
        name: value if given[name] is None else given[name]
        for name, value in {**sizes, **(tiny if given["tiny"] else {})}.items()
    }
    write(given["output"], {**about(), "benchmarks": {_file(measure): run(measure, chosen)}})


def _file(function: Callable[..., Any]) -> str:
    """The benchmark that it is from, whichever way that was started."""
    return Path(inspect.getfile(function)).stem


# --- a Python of its own ----------------------------------------------------------------------------------------------


def environment(*paths: str | Path, **more: str) -> dict[str, str]:
    """For processes of a benchmark: this very package and the files here can be imported, and what is in *paths*."""
    found = clean_environment(**more)
    places = (*map(str, paths), str(HERE), str(HERE.parent), found.get("PYTHONPATH", ""))
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, places))}


class Apart:
    """A function of a benchmark's file, in a fresh process: no other contender's imports, caches or settings.

    The function takes and returns what JSON can carry. On the way it may :func:`tell` and :func:`told`.
    """

    def __init__(self, function: Callable[..., Any], **words: Any) -> None:
        self._name = f"{function.__name__}({words})"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", "import figures; figures.serve()"),
                *(_file(function), function.__name__, json.dumps(words)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(),
        )

    def hear(self) -> Any:
        """What it tells next; what it returns comes last."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self._name} ended with {self._process.returncode}: {self._errors.read()[-4000:]}")
        return json.loads(line)

    def say(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """What it returns, once it has ended."""
        found = self.hear()
        self.close()
        return found

    def close(self) -> None:
        """The end of it, whether it has one of its own or not."""
        if self._process.poll() is None:
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()

    def kill(self) -> None:
        self._process.kill()
        self.close()


def apart(function: Callable[..., Any], **words: Any) -> Any:
    """What *function* returns in a process of its own."""
    process = Apart(function, **words)
    try:
        return process.result()
    except BaseException:
        process.kill()
        raise


@contextmanager
def together(processes: list[Apart]) -> Iterator[list[Apart]]:
    """None of them outlives the context."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


_answers: Any = None


def serve() -> None:
    """The other side of :class:`Apart`."""
    global _answers
    # What a library prints is no answer.
    _answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    file, function, words = sys.argv[1:]
    tell(getattr(importlib.import_module(file), function)(**json.loads(words)))
    _answers.close()
    # At exit some schedulers write what nobody will read.
    os._exit(0)


def tell(value: Any) -> None:
    _answers.write(json.dumps(value) + "\n")


def told() -> Any:
    return json.loads(sys.stdin.readline())
