"""A certificate of localhost and its key, made for one test by the system's openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

WORDS = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Their files. Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    files = ["-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(["openssl", *WORDS.split(), *files], cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"
