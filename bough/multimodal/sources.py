"""Where an item's bytes are: in the request, in a file, at a URL, or in an array of the caller's process."""

import base64
import binascii
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from bough.core.errors import RequestError
from bough.core.files import user_path
from bough.core.media import MediaKind, MediaSource

FIELDS: dict[MediaKind, str] = {"image": "image_data", "video": "video_data", "audio": "audio_data"}
PLURALS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "recordings"}
LONGEST_PATH = 4096
DEEPEST = 8  # lists within each other
is_absolute = re.compile("/(?!9j/|/)").match  # a path; JPEG and MP3 in base64 begin with a slash, too


def read_columns(given: Mapping[MediaKind, Any], count: int, many: bool) -> list[tuple[MediaSource, ...]]:
    """The items of each prompt, from one, a list, or a list for each prompt."""
    prompts: list[list[MediaSource]] = [[] for _ in range(count)]
    for kind, value in given.items():
        if value is None:
            continue
        shared = not many or not isinstance(value, list | tuple) or not value
        if not shared and len(value) != count:
            raise RequestError(f"{FIELDS[kind]} has {len(value)} entries for {count} prompts.", field=FIELDS[kind])
        for number, sources in enumerate(prompts):
            sources += [as_source(kind, each) for each in _flat(value if shared else value[number], FIELDS[kind])]
    return [tuple(sources) for sources in prompts]


def _flat(value: Any, field: str, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        if depth == DEEPEST:
            raise RequestError(
                f"{field} has lists in more than {DEEPEST} others; give one for each prompt.", field=field
            )
        for each in value:
            yield from _flat(each, field, depth + 1)
    elif value is not None:
        yield value


def as_source(kind: MediaKind, value: Any) -> MediaSource:
    """One item in the forms that SGLang and OpenAI have for it, or an object of the caller's process."""
    if isinstance(value, MediaSource):
        return value
    detail = frames = None
    if isinstance(value, Mapping):
        detail, frames = value.get("detail"), value.get("num_frames")
        value = next((value[name] for name in ("url", "path", "data") if value.get(name)), None)
    if hasattr(value, "convert"):  # a Pillow image
        value = np.asarray(value.convert("RGB"))
    elif hasattr(value, "detach"):  # torch's tensor
        value = (value.detach().float() if value.is_floating_point() else value).cpu().numpy()
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        value = file.getvalue()
    counted = frames is None or (type(frames) is int and frames > 0)
    if not isinstance(value, str | bytes) or not value or not counted:
        forms = "a URL, a data URL, base64, bytes, a file, a Pillow image, an array or a tensor"
        raise RequestError(f"{FIELDS[kind]}: give {forms}; num_frames counts from 1.", field=FIELDS[kind])
    return MediaSource(kind, value, detail if isinstance(detail, str) else None, frames)


def is_remote(content: bytes | str) -> bool:
    return isinstance(content, str) and content[:8].lower().startswith(("http://", "https://"))


def read_local(content: bytes | str, root: str | None, most: int) -> bytes:
    """The bytes of an item that is not remote. Takes as long as there is to decode and to read."""
    if isinstance(content, str):
        scheme = content[:32].partition(":")[0].lower()
        if scheme == "data":
            content = _from_base64(content.partition(",")[2], most)
        elif scheme == "file":
            content = _read_file(unquote(urlsplit(content).path), root, most)
        elif "://" in content[:32]:
            raise RequestError(f"{scheme}:// is not read; use http, https, file or data.")
        elif len(content) < LONGEST_PATH and ("." in content[:1] + content[-6:] or is_absolute(content)):
            content = _read_file(content, root, most)
        else:
            content = _from_base64(content, most)
    if len(content) > most:
        raise too_large(most)
    return content


def too_large(most: int) -> RequestError:
    return RequestError(f"It is larger than the {most >> 20} MiB that are taken (--mm-max-item-mb); send less.")


def _from_base64(data: str, most: int) -> bytes:
    if len(data) * 3 // 4 > most + 4:
        raise too_large(most)
    data = "".join(data.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("It is neither a URL, nor a file, nor valid base64.") from None


def _read_file(path: str, root: str | None, most: int) -> bytes:
    """A file below the folder, after all links: what was opened is asked where it is."""
    if root is None:
        advice = "start with --allowed-local-media-path FOLDER, or send the bytes as base64"
        raise RequestError(f"Requests may not name files here; {advice}.")
    home = user_path(root).resolve()
    try:
        with open(os.open(home / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            inside = Path(f"/proc/self/fd/{file.fileno()}").readlink().is_relative_to(home)
            if inside and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read(most + 1)
    except (OSError, ValueError):
        inside = False  # which of both it is tells nobody what files there are
    raise RequestError("There is no such file below --allowed-local-media-path.")
