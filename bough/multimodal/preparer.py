"""From a prompt with placeholders and its sources to what the engine takes. Nothing here blocks the event loop: bytes
are read in threads, media are prepared in processes, each content once however many ask for it.

What was prepared is a file in shared memory. It lives as long as somebody holds its `Prepared`: the cache, and the
prompts that it stands in.
"""

import asyncio
import hashlib
import importlib.util
import itertools
import os
import shutil
import tempfile
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from bough.core.errors import RequestError
from bough.core.files import SHARED
from bough.core.media import MediaKind, MediaPrompt, MediaSource
from bough.core.pipe_process import PATIENCE, ProcessPool
from bough.core.plan import IntArray
from bough.core.setting_checks import by_kind
from bough.core.settings import MediaSettings
from bough.multimodal.decoding import Limits
from bough.multimodal.expansion import expand
from bough.multimodal.families import FAMILIES, Hello, Prepared, Task
from bough.multimodal.fetching import FetchRules, fetch
from bough.multimodal.sources import FIELDS, PLURALS, is_remote, read_local
from bough.observability.request_meter import RequestMeter
from bough.tokenizer.tokenizer import Tokenizer

KINDS: dict[str, list[MediaKind]] = {family: stated["takes"] for family, stated in FAMILIES.items()}
DEFAULT_COUNTS = {"image": 64, "video": 4, "audio": 16}
DECODERS = {"image": "PIL", "video": "av", "audio": "av"}
MOST_FRAMES = 1 << 20  # no clip has more
AT_ONCE = 16  # items of either origin whose bytes are in memory
read_answer = msgspec.msgpack.Decoder(Prepared | str).decode  # here: msgspec crashes if two threads begin with a type


class PreparedPrompt(NamedTuple):
    input_ids: IntArray
    media: MediaPrompt
    items: tuple[Prepared, ...]  # the files live as long as these do

    @property
    def plain_ids(self) -> IntArray:
        """As the model's own processor writes them."""
        ids, rows = self.input_ids.copy(), {item.digest: item.row for item in self.items}
        for item in self.media.items:
            for begin, count in item.spans:
                ids[begin : begin + count] = rows[item.digest]
        return ids


class MediaPreparer:
    def __init__(
        self,
        family: str,
        folder: Path,
        tokenizer_path: Path,
        tokenizer: Tokenizer,
        settings: MediaSettings,
        meter: RequestMeter,
    ) -> None:
        self._family = family
        self._meter = meter
        self._tokenizer = tokenizer
        self._settings = settings
        self._most = DEFAULT_COUNTS | by_kind(settings.limit_mm_data_per_request, "limit-mm-data-per-request", int)
        self._options = by_kind(settings.mm_process_config, "mm-process-config", dict)
        limits, size = Limits(settings.mm_max_pixels, settings.mm_max_seconds), settings.mm_processor_worker_num
        hello = Hello(str(folder), str(tokenizer_path), self._options, limits, settings.mm_timeout_s)
        self._pool = ProcessPool("bough.multimodal.worker", msgspec.msgpack.encode(hello), size)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="bough-media")
        domains = [name.strip().lower() for name in (settings.allowed_media_domains or "").split(",") if name.strip()]
        self._rules = FetchRules(domains, settings.mm_max_item_mb << 20, settings.mm_timeout_s)
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._room = [asyncio.Semaphore(AT_ONCE) for _ in range(2)]  # the second for URLs, whose hosts may be slow
        self._cache: OrderedDict[bytes, Prepared] = OrderedDict()
        self._cached_bytes = 0
        self._pending: dict[bytes, asyncio.Task[Prepared]] = {}

    async def prepare(self, input_ids: IntArray, sources: Sequence[MediaSource]) -> PreparedPrompt:
        counts = Counter(source.kind for source in sources)
        for kind, count in counts.items():
            reason = ""
            if kind not in KINDS[self._family]:
                reason = f"This model takes no {PLURALS[kind]}; leave {FIELDS[kind]} out."
            elif count > self._most[kind]:
                most = f"at most {self._most[kind]} are taken (--limit-mm-data-per-request)"
                reason = f"The prompt has {count} {PLURALS[kind]}; {most}."
            elif importlib.util.find_spec(DECODERS[kind]) is None:
                reason = f"{DECODERS[kind]} is missing, which decodes {PLURALS[kind]}; pip install 'bough[multimodal]'."
            if reason:
                raise RequestError(reason, field=FIELDS[kind])
        alone = counts["image"] == 1 or self._family != "llava_onevision"
        found = await asyncio.gather(*(self._item(source, alone) for source in sources))
        return PreparedPrompt(*expand(input_ids, found, self._tokenizer), tuple(found))

    def warm(self) -> None:
        """Starts the workers beside what else starts, so that no item waits for their libraries."""
        installed = importlib.util.find_spec("PIL") is not None  # else requests are told
        for _ in range(self._settings.mm_processor_worker_num if installed else 0):
            self._threads.submit(self._pool.warm)

    def close(self) -> None:
        self._pool.close()
        self._threads.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _item(self, source: MediaSource, alone: bool) -> Prepared:
        try:
            async with self._room[is_remote(source.content)]:
                if is_remote(source.content):
                    content = await fetch(str(source.content), self._rules)
                else:
                    root = self._settings.allowed_local_media_path
                    content = await asyncio.to_thread(read_local, source.content, root, self._rules.most)
                # What changes nothing is no part of it, so that equal content is found.
                frames = min(source.num_frames or 0, MOST_FRAMES) or None
                task = Task(source.kind, content, "low" if source.detail == "low" else None, frames, alone)
                return await self._once(await asyncio.to_thread(self._digest, task), task)
        except RequestError as error:
            error.field = FIELDS[source.kind]
            raise

    def _digest(self, task: Task) -> bytes:
        """Of the content and of all that its preparation depends on."""
        how = [task.kind, task.detail, task.num_frames, task.alone, self._options.get(task.kind)]
        key = hashlib.blake2b(msgspec.json.encode(how)).digest()
        return hashlib.blake2b(task.content, digest_size=16, key=key).digest()

    async def _once(self, digest: bytes, task: Task) -> Prepared:
        found = self._cache.get(digest)
        self._meter.media(len(task.content), cached=found is not None)
        if found is not None:
            self._cache.move_to_end(digest)
            return found
        if digest not in self._pending:
            pending = self._pending[digest] = asyncio.create_task(self._prepare(digest, task))
            pending.add_done_callback(lambda _: self._pending.pop(digest))
        return await asyncio.shield(self._pending[digest])

    async def _prepare(self, digest: bytes, task: Task) -> Prepared:
        if self._folder is None:
            place = SHARED if os.access(SHARED, os.W_OK) else None
            self._folder = Path(tempfile.mkdtemp(prefix=f"bough-{os.getpid()}-", dir=place))
        path = self._folder / str(next(self._numbers))
        began = time.perf_counter()
        try:
            asked = msgspec.structs.replace(task, file=str(path), digest=digest)
            prepared = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, asked)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._meter.prepared_media(time.perf_counter() - began)
        weakref.finalize(prepared, path.unlink, missing_ok=True)
        most = self._settings.mm_preprocess_cache_size_mb << 20
        self._cache[digest] = prepared
        self._cached_bytes += prepared.nbytes
        while self._cached_bytes > most:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return prepared

    def _ask(self, task: Task) -> Prepared:
        timeout_s = self._settings.mm_timeout_s
        try:
            answer = self._pool.exchange(msgspec.msgpack.encode(task), timeout_s, PATIENCE)
        except ChildProcessError as error:
            text = f"Media cannot be prepared: {error}; the server's log says why."
            raise RequestError(text, status_code=500, err_type="InternalServerError") from None
        if answer is None:
            limits = f"more than {timeout_s:g} s (--mm-timeout-s) or too much memory"
            raise RequestError(f"Preparing the {task.kind} takes {limits}; send a smaller one.")
        outcome: Prepared | str = read_answer(answer)
        if isinstance(outcome, str):
            raise RequestError(outcome)
        return outcome
