"""Images, video and sound in a prompt: what a request carries of them beside its tokens.

The edge prepares media (`bough.multimodal`): it expands the placeholders of a prompt, and writes what the encoder
computes from to a file in shared memory. In the prompt's ids each place of an item then has a number of its own, from
`MEDIA_ID` on, that follows from the item's digest. So the radix tree shares an image as it shares text and keeps two
images apart, and needs to know of neither. An executor puts the encoder's output in those places.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MediaKind = Literal["image", "video", "audio", "embeds"]  # the last: vectors that need no encoder
MEDIA_ID = 1 << 30  # beyond every vocabulary


class MediaSource(msgspec.Struct, frozen=True):
    """An item as a client sends it: its bytes, or where they are (a data, http(s) or file URL, a path)."""

    kind: MediaKind
    content: bytes | str
    detail: str | None = None  # OpenAI's `low`, `high` or `auto`
    num_frames: int | None = None  # of a clip; None: as many as its family takes


class Feature(msgspec.Struct, frozen=True):
    """An array that an encoder takes, by the name that Transformers gives it, in a file of features."""

    name: str
    dtype: str  # as numpy names it
    shape: tuple[int, ...]  # as Transformers' processor gives it for this item alone: items are joined along the first
    offset: int  # in bytes


class MediaItem(msgspec.Struct, frozen=True):
    """One image, clip or recording of a prompt, ready for the encoder."""

    kind: MediaKind
    digest: bytes  # 16 bytes: of the content and of how it was prepared
    # First position in the prompt and count: where the encoder's rows go, in order. None: every token attends to them.
    spans: tuple[tuple[int, int], ...]
    features: tuple[Feature, ...]
    file: str  # the edge process keeps it until the request has ended

    @property
    def count(self) -> int:
        return sum(count for _, count in self.spans)


class MediaPrompt(msgspec.Struct, frozen=True):
    """What stands in a prompt beside text."""

    items: tuple[MediaItem, ...]  # in the order of the prompt
    # int32 [3, prompt]: time, height and width of each token, of models that rotate by them (M-RoPE). A generated
    # token's place is its place in the sequence, plus `delta`, for all three.
    positions: bytes | None = None
    delta: int = 0


def media_ids(digest: bytes, count: int) -> npt.NDArray[np.int32]:
    """What stands in a prompt's ids for an item."""
    import numpy as np  # here, so that reading messages does not load it

    numbers = np.frombuffer(hashlib.shake_128(digest).digest(4 * count), dtype="<i4")
    return (numbers & (MEDIA_ID - 1)) | np.int32(MEDIA_ID)
