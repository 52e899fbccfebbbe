"""Pictures as back ends send them: an address, or the bytes written out. Files are read here, where the program runs,
because a server may stand on another machine."""

from __future__ import annotations

import base64
from pathlib import Path

from bough.core.errors import RequestError

MARKS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}
ADDRESSES = ("http://", "https://", "data:")


def image_url(source: str | bytes) -> str:
    """A picture as an address: its own, or its bytes written out."""
    if isinstance(source, str) and source.startswith(ADDRESSES):
        return source
    media_type, data = image_data(source)
    return f"data:{media_type};base64,{data}"


def image_data(source: str | bytes) -> tuple[str, str]:
    """(media type, base64) of a picture given as bytes, as a file or in base64."""
    raw = _read(source) if isinstance(source, str) else source
    return _media_type(raw) or "application/octet-stream", base64.b64encode(raw).decode()


def _read(source: str) -> bytes:
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raw = _decoded(source)
        if _media_type(raw) is None:
            raise RequestError(f"The picture {source!r:.80} cannot be read: {error.strerror}.") from None
        return raw


def _decoded(text: str) -> bytes:
    """What a text in base64 stands for; nothing if it is not one."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


def _media_type(raw: bytes) -> str | None:
    found = next((kind for mark, kind in MARKS.items() if raw.startswith(mark)), None)
    return found or ("image/webp" if raw[8:12] == b"WEBP" else None)
