"""Fetches the schemas that other people wrote into `build/schemas`: `make schemas`, once.

They come out of packages of the Python registry: the official JSON-Schema-Test-Suite from the source distribution of
`jsonschema`, the tools of the Berkeley function-calling leaderboard from `bfcl-eval`, the schemas of many configuration
files from `check-jsonschema`. Only the files are unpacked; nothing is installed.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.constrained.suites import FOLDER

PACKAGES = (("jsonschema", ["--no-binary", ":all:"]), ("bfcl-eval", []), ("check-jsonschema", []))


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for package, options in PACKAGES:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", temporary, *options]
            subprocess.run([*command, package], check=True)
        for archive in Path(temporary).iterdir():
            unpack(archive, FOLDER)
    print(f"The schemas are in {FOLDER}.")


def unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)
    else:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")


if __name__ == "__main__":
    main()
