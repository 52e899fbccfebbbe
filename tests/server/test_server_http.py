"""What HTTPS needs is looked at before the server starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from starlette.applications import Starlette

from bough.core.errors import SettingsError
from bough.core.settings import Settings
from bough.server.http import HttpServer
from tests.fakes.certificates import make_certificate


def refusal(**files: Path) -> str:
    settings = Settings.from_flat({flag: str(path) for flag, path in files.items()}).server
    with socket.socket() as listener, pytest.raises(SettingsError) as caught:
        HttpServer(Starlette(), listener, settings)
    return str(caught.value)


def test_a_file_that_cannot_be_read_is_named_with_its_flag(tmp_path: Path) -> None:
    there, missing = tmp_path / "there.pem", tmp_path / "missing.pem"
    there.touch()
    reason = f"{missing} cannot be read: No such file or directory."
    assert refusal(ssl_certfile=missing) == f"--ssl-certfile {reason}"
    assert refusal(ssl_certfile=there, ssl_keyfile=missing) == f"--ssl-keyfile {reason}"
    assert refusal(ssl_certfile=tmp_path) == f"--ssl-certfile {tmp_path} cannot be read: Is a directory."


def test_only_files_that_were_given_are_named(tmp_path: Path) -> None:
    cert, _ = make_certificate(tmp_path)
    no_key = tmp_path / "no_key.pem"
    no_key.write_text("no key")
    alone, both = refusal(ssl_certfile=cert), refusal(ssl_certfile=cert, ssl_keyfile=no_key)
    assert alone.startswith(f"--ssl-certfile {cert} cannot be used: ") and "None" not in alone
    assert both.startswith(f"--ssl-certfile {cert} with --ssl-keyfile {no_key} cannot be used: ")
    assert "a certificate and its own private key (PEM), in one file or in two" in alone


def test_a_key_needs_its_certificate(tmp_path: Path) -> None:
    assert refusal(ssl_keyfile=tmp_path / "key.pem") == "--ssl-keyfile needs --ssl-certfile beside it."
