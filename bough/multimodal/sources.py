"""Where an item's bytes are: in the request, in a file, at a URL, or in an array of the caller's process."""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np

from bough.core.errors import RequestError
from bough.core.media import MediaKind, MediaSource

FIELDS: dict[MediaKind, str] = {"image": "image_data", "video": "video_data", "audio": "audio_data"}
LONGEST_PATH = 4096


def read_columns(given: Mapping[MediaKind, Any], count: int, many: bool) -> list[tuple[MediaSource, ...]]:
    """The items of each prompt, from one, a list, or a list for each prompt."""
    prompts: list[list[MediaSource]] = [[] for _ in range(count)]
    for kind, value in given.items():
        listed = isinstance(value, list | tuple)
        if listed and many and len(value) != count:
            raise RequestError(f"{FIELDS[kind]} has {len(value)} entries for {count} prompts.", field=FIELDS[kind])
        if listed and not many and len(value) == 1 and isinstance(value[0], list | tuple):
            value = value[0]
        for number, sources in enumerate(prompts):
            own = value[number] if listed and many else value
            own = own if isinstance(own, list | tuple) else [own]
            sources += [as_source(kind, each) for each in own if each is not None]
    return [tuple(sources) for sources in prompts]


def as_source(kind: MediaKind, value: Any) -> MediaSource:
    """One item in the forms that SGLang and OpenAI have for it, or an object of the caller's process."""
    detail = frames = None
    if isinstance(value, Mapping):
        detail, frames = value.get("detail"), value.get("num_frames")
        value = next((value[name] for name in ("url", "path", "data") if value.get(name)), None)
    if isinstance(value, MediaSource):
        return value
    if hasattr(value, "convert") and hasattr(value, "tobytes"):  # a Pillow image
        value = np.asarray(value.convert("RGB"))
    elif hasattr(value, "detach"):  # torch's tensor
        value = value.detach().cpu().float().numpy() if value.is_floating_point() else value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.lib.format.write_array(file, np.ascontiguousarray(value), allow_pickle=False)
        value = file.getvalue()
    if not isinstance(value, str | bytes) or not value:
        forms = "a URL, a data URL, base64, bytes, a file, a Pillow image, an array or a tensor"
        raise RequestError(f"{FIELDS[kind]} holds {type(value).__name__}; give {forms}.", field=FIELDS[kind])
    if frames is not None and (type(frames) is not int or frames < 1):
        raise RequestError(f"num_frames must be a whole number from 1 on, got {frames!r}.", field=FIELDS[kind])
    return MediaSource(kind, value, detail if isinstance(detail, str) else None, frames)


def is_remote(source: MediaSource) -> bool:
    return isinstance(source.content, str) and source.content[:8].lower().startswith(("http://", "https://"))


def read_local(source: MediaSource, root: str | None, most: int) -> bytes:
    """The bytes of an item that is not remote. Takes as long as there is to decode and to read."""
    content = source.content
    if isinstance(content, bytes):
        return checked_size(content, most, source)
    if content[:5].lower() == "data:":
        head, comma, data = content.partition(",")
        if not comma:
            raise RequestError("The data URL has no comma; write data:image/png;base64,DATA.", field=FIELDS[source.kind])
        if not head.lower().endswith(";base64"):
            return checked_size(unquote_to_bytes(data), most, source)
        return _from_base64(data, most, source)
    if content[:5].lower() == "file:":
        return _read_file(unquote(urlsplit(content).path), root, most, source)
    if "://" in content[:32]:
        scheme = content.partition("://")[0]
        raise RequestError(f"{scheme}:// is not read; use http, https, file or data.", field=FIELDS[source.kind])
    if len(content) < LONGEST_PATH and root is not None and (Path(root) / content).is_file():
        return _read_file(content, root, most, source)
    try:
        return _from_base64(content, most, source)
    except RequestError:
        if len(content) < LONGEST_PATH and ("/" in content or "." in content):
            return _read_file(content, root, most, source)  # which says why not
        raise


def checked_size(content: bytes, most: int, source: MediaSource) -> bytes:
    if len(content) > most:
        raise too_large(most, source)
    if not content:
        raise RequestError(f"The {source.kind} is empty.", field=FIELDS[source.kind])
    return content


def too_large(most: int, source: MediaSource) -> RequestError:
    limit = f"{most >> 20} MiB that are taken (--mm-max-item-mb)"
    return RequestError(f"The {source.kind} is larger than the {limit}; send a smaller one.", field=FIELDS[source.kind])


def _from_base64(data: str, most: int, source: MediaSource) -> bytes:
    if len(data) * 3 // 4 > most + 4:
        raise too_large(most, source)
    data = unquote(data) if "%" in data else data
    data = data.translate({ord(c): None for c in " \r\n\t"}).rstrip("=")
    try:
        altered = data.replace("-", "+").replace("_", "/")
        return checked_size(base64.b64decode(altered + "=" * (-len(data) % 4), validate=True), most, source)
    except (binascii.Error, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"{FIELDS[source.kind]} is neither a URL nor valid base64 ({error}).", field=FIELDS[source.kind]
        ) from None


def _read_file(path: str, root: str | None, most: int, source: MediaSource) -> bytes:
    """A file below the folder, after all links: what is opened is asked where it is."""
    field = FIELDS[source.kind]
    if root is None:
        raise RequestError(
            "Requests may not name files here; start with --allowed-local-media-path FOLDER, or send the bytes (base64).",
            field=field,
        )
    home = Path(root).expanduser().resolve()
    try:
        fd = os.open(home / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            where = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if not where.is_relative_to(home) or not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PermissionError
            return checked_size(file.read(most + 1), most, source)
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"The file is not below --allowed-local-media-path, or cannot be read ({type(error).__name__}).", field=field
        ) from None
