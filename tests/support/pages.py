"""The pages of the documentation, and what stands in them for others to type: Python, and commands.

A block of Python that cannot be run has a reason in the page, in the line above it: ``% not run: ...``, or
``<!-- not run: ... -->`` where the page is read as it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md"))
    if path.name != "CHANGELOG.md"
)

_FENCE = re.compile(r"^(?P<indent> *)```(?P<word>[^\n]*)\n(?P<body>.*?)^ *```$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"(?:% not run: (.+)|<!-- not run: (.+) -->)\s*\n\Z")
_COMMAND = re.compile(r"`(celery [^`]*)`|^ {4,}(?:.*&& )?(celery [^\n]*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    code: str
    reason: str
    """Why it is not run; empty: it is."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def python_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for fence in _FENCE.finditer(text):
        if fence["word"].strip() in ("python", "py", "python3"):
            said = _REASON.search(text[: fence.start()])
            reason = "" if said is None else said[1] or said[2]
            yield Block(page, text[: fence.start()].count("\n") + 2, fence["body"], reason)


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Line, and the words of each ``celery ...``; placeholders in capitals and brackets are left in, brackets not."""
    text = page.read_text()
    for found in _COMMAND.finditer(text):
        words = re.split(r" # | \| | && |\s#", found[1] or found[2])[0]
        yield text[: found.start()].count("\n") + 1, shlex.split(re.sub(r"[\[\]]|\.\.\.", " ", words))


def extras(page: Path) -> set[str]:
    """The extras that a reader is told to install."""
    found = re.findall(r"celery-anarchon\[([\w,]+)\]", page.read_text())
    return {name for names in found for name in names.split(",")}
