"""Certificates of a test's own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from servers import missing


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed one for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl") or missing("no openssl on PATH")
    key, file = folder / f"{name}.key", folder / f"{name}.crt"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(file)),
        ],
        check=True,
        capture_output=True,
    )
    return file, key


def signed(folder: Path, name: str, by: tuple[Path, Path]) -> tuple[Path, Path]:
    """One that another one vouches for, and its key: what a server that looks at clients wants to see."""
    openssl = shutil.which("openssl") or missing("no openssl on PATH")
    key, file, request = folder / f"{name}.key", folder / f"{name}.crt", folder / f"{name}.csr"
    authority, its_key = by
    for command in (
        ["req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request],
        [
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            authority,
            "-CAkey",
            its_key,
            "-CAcreateserial",
            "-days",
            2,
            "-out",
            file,
        ],
    ):
        subprocess.run([openssl, *map(str, command)], check=True, capture_output=True)
    return file, key
