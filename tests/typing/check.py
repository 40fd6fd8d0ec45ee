"""Do mypy --strict and pyright take what users may write, and refuse the rest, naming what is wrong?

    python tests/typing/check.py

Every line of the snippets is asked: an error where none is expected counts, and so does one that is missing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
SNIPPETS = [FOLDER / "must.py", FOLDER / "must_not.py"]
REFUSED = re.compile(r"#\s*refused:\s*(\S+)\s*$")


def mypy() -> Iterator[tuple[str, int, str]]:
    """File, line and text of each error."""
    done = run("-m", "mypy", "--strict", "--output", "json", *map(str, SNIPPETS))
    for line in done.splitlines():
        found = json.loads(line)
        if found["severity"] == "error":
            # Which overloads there are stands in the hint.
            yield Path(found["file"]).name, found["line"], f"{found['message']} {found['hint'] or ''}"


def pyright() -> Iterator[tuple[str, int, str]]:
    found = json.loads(run("-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, SNIPPETS)))
    for each in found["generalDiagnostics"]:
        if each["severity"] == "error":
            # Its lines begin at 0.
            yield Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"]


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def expected() -> dict[tuple[str, int], str]:
    return {
        (path.name, number): match[1]
        for path in SNIPPETS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := REFUSED.search(line))
    }


def main() -> int:
    wrong = 0
    wanted = expected()
    assert wanted
    for checker in (mypy, pyright):
        errors: dict[tuple[str, int], list[str]] = defaultdict(list)
        for file, line, text in checker():
            errors[file, line].append(text)
        for place in sorted({*wanted, *errors}):
            word, said = wanted.get(place), " | ".join(errors.get(place, []))
            if word is None or word not in said:
                wrong += 1
                print(f"{checker.__name__}: {place[0]}:{place[1]}: wanted {word or 'no error'}, not: {said or 'none'}")
        print(f"{checker.__name__}: {len(errors)} lines refused")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
