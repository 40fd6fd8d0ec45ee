"""The example backend, installed as its users would, passes the kit that is shipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_backend"


@pytest.mark.fleet
def test_it_is_installed_and_passes_the_kit(tmp_path: Path) -> None:
    # A copy: building leaves folders behind.
    copy = tmp_path / "example"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(copy)]
    done = subprocess.run([sys.executable, *install], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    (asked,) = re.findall(
        r"TestFolder: (\d+) clauses, \d+ tests; not applicable: (?:none|test_C17[^,]*)\n", done.stdout
    )
    assert int(asked) >= 20
    assert "skipped" not in done.stdout
