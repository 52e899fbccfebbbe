"""Vectors in the place of a prompt's tokens (`input_embeds`): they travel like an image that was encoded already."""

import hashlib
import tempfile
from typing import Any

import numpy as np

from bough.core.errors import RequestError
from bough.core.files import SHARED
from bough.core.media import Feature, MediaItem, MediaPrompt, media_ids


def embedded(vectors: Any) -> dict[str, Any]:
    """What a prompt of such vectors has in the place of ids: numbers that follow from them, so that the radix tree
    tells prompts apart, and their file, which lives as long as the prompt."""
    try:
        values = np.ascontiguousarray(vectors, dtype="<f4")
    except (ValueError, TypeError):
        values = np.zeros(0, dtype="<f4")
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        text = "input_embeds must be a list of vectors, all of one length, or a list of such lists; each number finite."
        raise RequestError(text, field="input_embeds")
    count, content = len(values), values.tobytes()
    digest = hashlib.blake2b(content, digest_size=16, key=b"input_embeds").digest()
    file = tempfile.NamedTemporaryFile(prefix="bough-", dir=SHARED if SHARED.is_dir() else None)  # noqa: SIM115
    file.write(content)
    file.flush()
    item = MediaItem("embeds", digest, ((0, count),), (Feature("embeds", "<f4", values.shape, 0),), file.name)
    ids, plain = media_ids(digest, count), np.zeros(count, dtype=np.int32)
    return {"ids": ids, "plain_ids": plain, "media": MediaPrompt((item,)), "held": (file,)}
