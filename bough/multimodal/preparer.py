"""From a prompt with placeholders and its sources to what the engine takes. Nothing here blocks the event loop: bytes are
read in threads, media are prepared in processes, each content once however many ask for it.

What was prepared is a file in shared memory. It lives as long as somebody holds its `PreparedItem`: the cache, and the
prompts that it stands in.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import tempfile
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bough.core.errors import RequestError, SettingsError
from bough.core.media import MediaKind, MediaPrompt, MediaSource
from bough.core.pipe_process import ProcessPool
from bough.core.plan import IntArray
from bough.core.settings import MediaSettings
from bough.core.shared_files import SHARED
from bough.multimodal.decoding import Limits
from bough.multimodal.expansion import PLURALS, PreparedItem, expand
from bough.multimodal.fetching import FetchRules, fetch
from bough.multimodal.sources import FIELDS, is_remote, read_local
from bough.multimodal.worker import Hello, Outcome, Task
from bough.observability.request_meter import RequestMeter
from bough.tokenizer.tokenizer import Tokenizer

IMAGE_FAMILIES = ("llava", "llava_next", "gemma3", "idefics3", "smolvlm", "mistral3")
VIDEO_FAMILIES = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")
KINDS: dict[str, tuple[MediaKind, ...]] = {
    **dict.fromkeys(IMAGE_FAMILIES, ("image",)),
    **dict.fromkeys(VIDEO_FAMILIES, ("image", "video")),
    "qwen2_audio": ("audio",),
}
DEFAULT_COUNTS = {"image": 64, "video": 4, "audio": 16}
DECODERS = {"image": "PIL", "video": "av", "audio": "av"}
AT_ONCE = 16  # items whose bytes are in memory
GRACE_S = 5.0  # beyond its own time, until a worker is given up


class PreparedPrompt(NamedTuple):
    input_ids: IntArray
    media: MediaPrompt
    items: tuple[PreparedItem, ...]  # whoever holds these holds their files


class MediaPreparer:
    def __init__(
        self, model_type: str, folder: Path, tokenizer_path: Path, tokenizer: Tokenizer, settings: MediaSettings
    ) -> None:
        self._kinds = KINDS[model_type]
        self._by_number = model_type == "llava_onevision"  # it looks closer at an image that is alone
        self._tokenizer = tokenizer
        self._settings = settings
        self._counts = DEFAULT_COUNTS | read_object(settings.limit_mm_data_per_request, "limit_mm_data_per_request", int)
        self._options = read_object(settings.mm_process_config, "mm_process_config", dict)
        limits = Limits(settings.mm_max_pixels, settings.mm_max_seconds)
        hello = Hello(str(folder), str(tokenizer_path), self._options, limits, settings.mm_timeout_s)
        size = settings.mm_processor_worker_num
        self._pool = ProcessPool("bough.multimodal.worker", msgspec.msgpack.encode(hello), size)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="bough-media")
        self._rules = FetchRules(
            [name.strip().lower() for name in (settings.allowed_media_domains or "").split(",") if name.strip()],
            settings.mm_max_item_mb << 20,
            settings.mm_timeout_s,
        )
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._cache: OrderedDict[bytes, PreparedItem] = OrderedDict()
        self._cached_bytes = 0
        self._pending: dict[bytes, asyncio.Task[PreparedItem]] = {}
        self.meter = RequestMeter()

    async def prepare(self, input_ids: IntArray, sources: Sequence[MediaSource]) -> PreparedPrompt:
        counts = Counter(source.kind for source in sources)
        for kind, count in counts.items():
            if kind not in self._kinds:
                raise RequestError(f"This model takes no {PLURALS[kind]}; leave them out.", field=FIELDS[kind])
            if count > self._counts[kind]:
                most = f"at most {self._counts[kind]} are taken (--limit-mm-data-per-request)"
                raise RequestError(f"The prompt has {count} {PLURALS[kind]}; {most}.", field=FIELDS[kind])
            if importlib.util.find_spec(DECODERS[kind]) is None:
                text = f"{DECODERS[kind]} is missing, which decodes {PLURALS[kind]}; pip install 'bough[multimodal]'."
                raise RequestError(text, field=FIELDS[kind])
        alone = counts["image"] == 1 or not self._by_number
        found = await asyncio.gather(*(self._item(source, alone) for source in sources))
        return PreparedPrompt(*expand(input_ids, found, self._tokenizer), tuple(found))

    def close(self) -> None:
        self._pool.close()
        self._threads.shutdown()
        self._cache.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _item(self, source: MediaSource, alone: bool) -> PreparedItem:
        async with self._room:
            if is_remote(source):
                content = await fetch(source, self._rules)
            else:
                path = self._settings.allowed_local_media_path
                content = await asyncio.to_thread(read_local, source, path, self._rules.most)
            task = Task(source.kind, content, "", source.detail, source.num_frames, alone)
            digest = await asyncio.to_thread(self._digest, task)
            self.meter.media(len(content), cached=digest in self._cache)
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
            if digest not in self._pending:
                pending = self._pending[digest] = asyncio.create_task(self._prepare(digest, task))
                pending.add_done_callback(lambda _: self._pending.pop(digest))
            return await asyncio.shield(self._pending[digest])

    def _digest(self, task: Task) -> bytes:
        """Of the content and of all that its preparation depends on."""
        how = [task.kind, task.detail, task.num_frames, task.alone, self._options.get(task.kind)]
        key = json.dumps(how, sort_keys=True).encode()
        return hashlib.blake2b(task.content, digest_size=16, key=hashlib.blake2b(key).digest()).digest()

    async def _prepare(self, digest: bytes, task: Task) -> PreparedItem:
        if self._folder is None:
            place = SHARED if os.access(SHARED, os.W_OK) else None
            self._folder = Path(tempfile.mkdtemp(prefix=f"bough-{os.getpid()}-", dir=place))
        path = self._folder / str(next(self._numbers))
        task = msgspec.structs.replace(task, file=str(path))
        began = time.perf_counter()
        try:
            prepared = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, task)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self.meter.prepared_media(time.perf_counter() - began)
        item = PreparedItem(task.kind, digest, str(path), prepared)
        weakref.finalize(item, path.unlink, missing_ok=True)
        self._keep(item)
        return item

    def _ask(self, task: Task) -> Any:
        timeout_s, field = self._settings.mm_timeout_s, FIELDS[task.kind]
        try:
            answer = self._pool.exchange(msgspec.msgpack.encode(task), timeout_s + GRACE_S)
        except ChildProcessError as error:
            text = f"Media cannot be prepared: {error}; the server's log says why."
            raise RequestError(text, status_code=500, err_type="InternalServerError") from None
        if answer is None:
            limits = f"more than {timeout_s:g} s (--mm-timeout-s) or too much memory"
            raise RequestError(f"Preparing the {task.kind} takes {limits}; send a smaller one.", field=field)
        outcome = msgspec.msgpack.decode(answer, type=Outcome)
        if outcome.prepared is None:
            raise RequestError(outcome.error or "", field=field)
        return outcome.prepared

    def _keep(self, item: PreparedItem) -> None:
        most = self._settings.mm_preprocess_cache_size_mb << 20
        if item.prepared.nbytes > most:
            return
        self._cache[item.digest] = item
        self._cached_bytes += item.prepared.nbytes
        while self._cached_bytes > most:
            self._cached_bytes -= self._cache.popitem(last=False)[1].prepared.nbytes


def read_object(text: str, name: str, kind: type) -> dict[str, Any]:
    """A setting that has a value for each kind of media."""
    try:
        given = json.loads(text)
        if given.keys() <= DEFAULT_COUNTS.keys() and all(type(value) is kind for value in given.values()):
            return dict(given)
    except (ValueError, AttributeError):
        pass
    flag = name.replace("_", "-")
    raise SettingsError(f'--{flag} must be a JSON object with "image", "video" or "audio" as names, got {text!r}.')
