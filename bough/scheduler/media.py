"""Images, video and sound as the scheduler sees them: what encoders compute in which step, and which outputs are kept.

In rows, radix tree and pages an item is tokens like any others. Only a chunk with such tokens needs the encoder's
output: it is computed in the step of the first such chunk, counts with its tokens against that step's budget, and is
kept for other requests until the room is needed. Plans have a placeholder in the place of each such token.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from bough.core.errors import RequestError
from bough.core.media import MEDIA_ID, MediaItem, media_ids
from bough.core.plan import BatchPlan, Encode, IntArray, Limits, StepResult
from bough.messages.requests import Generate
from bough.scheduler.assembly import Chunk
from bough.scheduler.request import Request

MOST_NAMES = 1 << 16  # items whose first number is remembered


class Media:
    """Owns the books of the encoder outputs that the executor keeps."""

    def __init__(self, limits: Limits, most_bytes: int) -> None:
        self._limits, self._most_bytes = limits, most_bytes
        if limits.media is not None and limits.media.width:
            self._most_bytes = 0  # vectors come with each prompt: to keep them would spare nothing
        self._whole = limits.media is not None and limits.media.whole
        self._kept: dict[bytes, tuple[int, int]] = {}  # number and bytes by digest, the one used longest ago first
        self._bytes = 0
        self._owners: dict[int, bytes] = {}  # whose number stands first in an item's place
        self._numbers = itertools.count()
        self._planned, self._encodes = 0, list[Encode]()  # of the plan in the making: tokens of its chunks, and items
        self._hits = self._misses = 0
        self._encode_s = 0.0
        self._lost = list[int]()  # outputs that the next plan lets go
        self._failures = Counter[bytes]()  # by digest: pages with what is no number may be cached

    @property
    def figures(self) -> dict[str, object]:
        return {
            "mm_encoder_cache_hits_total": self._hits,
            "mm_encoded_items_total": self._misses,
            "mm_encoder_seconds_total": self._encode_s,
            "mm_encoder_cache_bytes": self._bytes,
        }

    def after_step(self, result: StepResult) -> None:
        self._encode_s += result.encode_s
        for digest in [digest for digest, (number, _) in self._kept.items() if number in result.not_encoded]:
            number, size = self._kept.pop(digest)
            self._lost.append(number)
            self._bytes -= size
            self._failures[digest] += 1

    # Intake -----------------------------------------------------------------------------------------------------------

    def namespace(self, message: Generate, tokens: IntArray) -> str:
        """Where the request's prefixes are cached; a `RequestError` if what it has beside text cannot be served."""
        items = () if message.media is None else message.media.items
        if self._limits.speech is not None or (not items and int(tokens.max()) < MEDIA_ID):
            return message.namespace
        places = np.flatnonzero(tokens >= MEDIA_ID)
        if (media := self._limits.media) is None:
            if any(item.kind == "embeds" for item in items):
                text = "This model reads no input_embeds here; send text or input_ids."
                raise RequestError(text, field="input_embeds")
            raise RequestError("This engine reads text alone: it has no encoder for images, video or sound.")
        for item in items:
            if item.kind == "embeds" and (width := item.features[0].shape[-1]) != media.width:
                expected = f"this model reads {media.width}" if media.width else "a multi-modal model reads none here"
                raise RequestError(f"input_embeds has vectors of {width} numbers; {expected}.", field="input_embeds")
        spans = [(begin, size) for item in items for begin, size in item.spans]
        covered = [np.arange(begin, begin + size) for begin, size in spans]
        if not np.array_equal(places, np.concatenate([places[:0], *covered])):
            raise RequestError(
                f"The prompt has {len(places)} places for media, and its items take {sum(map(len, covered))}, or stand "
                "elsewhere; give each item as many placeholders as it has.",
                field="input_ids",
            )
        for item in items:
            own = np.concatenate([tokens[begin : begin + size] for begin, size in item.spans])
            if not np.array_equal(own, media_ids(item.digest, item.count)):
                raise RequestError("The prompt's ids in the place of an item are not those of it.", field="input_ids")
        longest = max(size for _, size in spans)
        if media.whole and longest > self._limits.chunk_tokens:
            raise RequestError(
                f"An image of {longest} tokens is computed in one step, which has {self._limits.chunk_tokens} at most; "
                "start the engine with a larger --chunked-prefill-size and --max-prefill-tokens."
            )
        positions = message.media.positions if message.media is not None else None
        if positions is not None and len(positions) != 12 * len(tokens):
            raise RequestError(f"media.positions must have three numbers for each of {len(tokens)} tokens.")
        failures = "".join(f" {self._failures[item.digest]}" for item in items if item.digest in self._failures)
        alone = failures or not self._distinct(items)
        if not alone:
            return message.namespace
        # They do not share all prefixes: only prompts with the same ones find what is cached there.
        digests = b"".join(item.digest for item in items)
        return f"media {hashlib.sha256((message.namespace + failures).encode() + digests).hexdigest()}"

    def _distinct(self, items: Iterable[MediaItem]) -> bool:
        """Whether no other item's place begins with the same number."""
        distinct = True
        for item in items:
            first = int(media_ids(item.digest, 1)[0])
            distinct &= self._owners.setdefault(first, item.digest) == item.digest
        while len(self._owners) > MOST_NAMES:
            del self._owners[next(iter(self._owners))]
        return distinct

    # Planning ---------------------------------------------------------------------------------------------------------

    def boundary(self, request: Request, length: int) -> int:
        """How many of so many first tokens a row may begin with: not a part of an item that is computed whole."""
        if not self._whole or request.media is None:
            return length
        spans = (span for item in request.media.items for span in item.spans)
        return next((begin for begin, size in spans if begin < length < begin + size), length)

    def fit(self, request: Request, first: int, most: int, budget: int) -> int:
        """How many of `most` tokens from `first` on go into a step, of which so many are left. Items that it has to
        encode count as well. One that a step begins with is always let in: it may be larger than any budget."""
        count, spent, seen = min(most, budget), 0, set[bytes]()
        for item in () if request.media is None else request.media.items:
            for begin, size in item.spans:
                before = begin - first
                if before + size <= 0:
                    continue
                if before >= count:
                    return count
                if item.digest not in self._kept and item.digest not in seen:
                    begins = not self._planned and before < self._limits.page_size
                    if before + spent + item.count > budget and not begins:
                        return max(0, before)
                    seen.add(item.digest)
                    spent += item.count
                    count = min(count, max(budget - spent, max(0, before) + self._limits.page_size))
                if self._whole and before + size > count:
                    alone = before == 0 and not self._planned and size <= most
                    return size if alone else before
        return count

    def take(self, request: Request, first: int, count: int) -> int:
        """A step has these tokens of a prompt; returns how many tokens of items it has to encode for them."""
        spent = 0
        self._planned += count
        for item in _between(request, first, count):
            found = self._kept.pop(item.digest, None)
            if found is None:
                assert self._limits.media is not None
                found = next(self._numbers), item.count * self._limits.media.row_bytes
                self._encodes.append(Encode(found[0], item.kind, item.count, item.features, item.file))
                self._bytes += found[1]
                self._misses += 1
                spent += item.count
            elif item.spans[0][0] >= first:
                self._hits += 1
            self._kept[item.digest] = found  # used last
        return spent

    def complete(self, plan: BatchPlan, chunks: Sequence[Chunk], begun: Iterable[tuple[Request, int]]) -> BatchPlan:
        """The plan with what its chunks need of encoders. The prompts of `begun` requests go on behind it; so much of
        each is computed."""
        self._planned, media = 0, self._limits.media
        if media is None or not (self._kept or self._lost or any(chunk.request.media for chunk in chunks)):
            return plan
        encodes, self._encodes = tuple(self._encodes), []
        hidden, tokens, following = np.int32(media.placeholder), plan.tokens, plan.next_tokens
        runs, place = list[tuple[int, int, int, int]](), 0
        for chunk in chunks:
            for item in _between(chunk.request, chunk.first, chunk.count):
                runs += _runs(item, self._kept[item.digest][0], chunk, place)
            place += chunk.count
        used = {item.digest for c in chunks for item in _between(c.request, c.first, c.count)}
        used |= {item.digest for r, done in begun for item in _between(r, done, r.prompt_len)}
        return replace(
            plan,
            tokens=np.where(tokens < MEDIA_ID, tokens, hidden),
            next_tokens=None if following is None else np.where(following < MEDIA_ID, following, hidden),
            input_logprobs=tuple(
                want if want.next_token < MEDIA_ID else replace(want, next_token=media.placeholder)
                for want in plan.input_logprobs
            ),
            dropped=self._evict(used),
            encodes=encodes,
            media=np.array(runs, dtype=np.int32) if runs else None,
            positions=_positions(chunks),
        )

    def _evict(self, used: set[bytes]) -> tuple[int, ...]:
        dropped, self._lost = self._lost, []
        for digest in [digest for digest in self._kept if digest not in used]:
            if self._bytes <= self._most_bytes:
                break
            number, size = self._kept.pop(digest)
            self._bytes -= size
            dropped.append(number)
        return tuple(dropped)


def _between(request: Request, first: int, count: int) -> list[MediaItem]:
    """The items of which tokens stand there."""
    items = () if request.media is None else request.media.items
    return [i for i in items if any(begin < first + count and first < begin + size for begin, size in i.spans)]


def _runs(item: MediaItem, output: int, chunk: Chunk, place: int) -> Iterable[tuple[int, int, int, int]]:
    row, end = 0, chunk.first + chunk.count
    for begin, size in item.spans:
        low, high = max(begin, chunk.first), min(begin + size, end)
        if low < high:
            yield place + low - chunk.first, output, row + low - begin, high - low
        row += size


def _positions(chunks: Sequence[Chunk]) -> IntArray | None:
    """The places by which the tokens of chunks rotate; None where all stand in the order of their sequences."""
    if all(c.request.media is None or c.request.media.positions is None for c in chunks):
        return None
    found = []
    for c in chunks:
        media = c.request.media
        plain = np.arange(c.first, c.first + c.count, dtype=np.int32)
        if media is not None and media.positions is not None:
            given = np.frombuffer(media.positions, dtype=np.int32).reshape(3, -1)[:, c.first : c.first + c.count]
            behind = np.tile(plain[given.shape[1] :] + np.int32(media.delta), (3, 1))
            found.append(np.concatenate([given, behind], axis=1))
        else:
            found.append(np.tile(plain, (3, 1)))
    joined: IntArray = np.concatenate(found, axis=1)
    return joined
