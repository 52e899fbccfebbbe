"""From a request to `Generate.media`: limits, the cache, whose files live how long, and what fails alone."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bough.core.errors import RequestError, SettingsError
from bough.core.files import SHARED
from bough.core.media import Feature, MediaSource
from bough.core.settings import MediaSettings, Settings
from bough.launch.parts import attach_media, check_media
from bough.launch.socket_folders import sweep_dead_owners
from bough.loader.locate import ModelFiles
from bough.messages.requests import Generate
from bough.multimodal.families import Prepared, Task
from bough.multimodal.preparer import AT_ONCE, MediaPreparer
from bough.observability.metrics import BY_NAME
from bough.observability.request_meter import RequestMeter, slices
from bough.tokenizer.load import load_tokenizer
from tests.multimodal.checkpoints import write_checkpoint, write_tokenizer
from tests.multimodal.test_multimodal_sources import png
from tests.server.native_engine import NativeEngine, open_server

PLACE = 7


class FakePool:
    """Four rows for each item, and a file of as many bytes as it says."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.tasks: list[Task] = []
        self.answer: Callable[[Task], Prepared | str | None] = self._prepared
        self._nbytes = nbytes

    def exchange(self, message: bytes, timeout_s: float, patience: int) -> bytes | None:
        task = msgspec.msgpack.decode(message, type=Task)
        self.tasks.append(task)
        outcome = self.answer(task)
        return None if outcome is None else msgspec.msgpack.encode(outcome)

    def _prepared(self, task: Task) -> Prepared:
        Path(task.file).write_bytes(b"features")
        ids = np.array([9, PLACE, PLACE, PLACE, PLACE, 10], dtype=np.int32).tobytes()
        features = (Feature("pixel_values", "float32", (1, 2), 0),)
        given = (task.kind, task.digest, task.file, features, self._nbytes, ids, PLACE, PLACE)
        return Prepared(*given, "", "", None, 1.0)

    def close(self) -> None:
        pass


@pytest.fixture
def preparer(tmp_path: Path) -> Iterator[MediaPreparer]:
    yield from make(tmp_path)


def make(folder: Path, family: str = "qwen2_vl", **settings: Any) -> Iterator[MediaPreparer]:
    write_tokenizer(folder)
    preparer = MediaPreparer(family, folder, folder, load_tokenizer(folder), MediaSettings(**settings), RequestMeter())
    preparer._pool = FakePool()  # type: ignore[assignment]
    yield preparer
    preparer.close()


def prepare(preparer: MediaPreparer, *contents: Any, ids: list[int] | None = None) -> Any:
    sources = [each if isinstance(each, MediaSource) else MediaSource("image", each) for each in contents]
    prompt = np.array(ids if ids is not None else [1, *[PLACE] * len(sources), 2], dtype=np.int32)
    return asyncio.run(preparer.prepare(prompt, sources))


def counted(preparer: MediaPreparer, name: str) -> float:
    return slices(preparer._meter.totals())[BY_NAME[name]][0]


def test_a_prompt_is_expanded_and_its_items_are_named(preparer: MediaPreparer) -> None:
    done = prepare(preparer, b"one", b"two")
    assert [item.spans for item in done.media.items] == [((2, 4),), ((8, 4),)]
    assert done.input_ids[[0, 1, 6, 7, 12, 13]].tolist() == [1, 9, 10, 9, 10, 2]
    assert done.plain_ids.tolist() == [1, *[9, *[PLACE] * 4, 10] * 2, 2], "as its users see them"
    assert done.media.items[0].digest != done.media.items[1].digest
    assert all(Path(item.file).is_file() for item in done.media.items)


def test_equal_content_is_prepared_once(preparer: MediaPreparer) -> None:
    pool: Any = preparer._pool

    def when_both_are_asked_for(task: Task) -> Prepared:
        for _ in range(1000):
            if counted(preparer, "media_bytes_total") == 6:
                break
            time.sleep(0.01)
        return pool._prepared(task)  # type: ignore[no-any-return]

    pool.answer = when_both_are_asked_for
    first = prepare(preparer, b"one", b"one")
    again = prepare(preparer, base64.b64encode(b"one").decode())
    assert len(preparer._pool.tasks) == 1  # type: ignore[attr-defined]
    assert first.media.items[0].digest == first.media.items[1].digest == again.media.items[0].digest
    assert counted(preparer, "media_bytes_total") == 9 and counted(preparer, "media_cache_hits_total") == 1


def test_how_it_is_prepared_is_part_of_what_it_is(tmp_path: Path) -> None:
    digests = set()
    for number, options in enumerate(["{}", '{"image": {"max_pixels": 9}}', '{"video": {"fps": 1}}']):
        folder = tmp_path / str(number)
        for preparer in make(folder, mm_process_config=options):
            low = MediaSource("image", b"x", "low")
            digests |= {prepare(preparer, each).media.items[0].digest for each in (b"x", low)}
    assert len(digests) == 4  # options for video change no image


def test_what_changes_nothing_is_no_part_of_what_it_is(preparer: MediaPreparer) -> None:
    plain = MediaSource("image", b"x")
    forms = [plain, MediaSource("image", b"x", "auto"), MediaSource("image", b"x", "high")]
    assert len({prepare(preparer, each).media.items[0].digest for each in forms}) == 1
    assert len(preparer._pool.tasks) == 1  # type: ignore[attr-defined]
    prepare(preparer, MediaSource("image", b"y", None, 10**30))  # which no message could carry


def test_files_live_as_long_as_somebody_holds_them(tmp_path: Path) -> None:
    for preparer in make(tmp_path, mm_preprocess_cache_size_mb=1):
        first = prepare(preparer, b"one")
        kept = Path(first.media.items[0].file)
        second = prepare(preparer, b"two")  # the cache has room for one
        assert kept.exists()
        del first
        gc.collect()
        assert not kept.exists()
        last = Path(second.media.items[0].file)
        del second
        gc.collect()
        assert last.exists()  # in the cache
        folder = last.parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_hosts_that_answer_slowly_hold_up_no_other_media(
    preparer: MediaPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        asked, release = [], asyncio.Event()

        async def slow(url: str, rules: Any) -> bytes:
            asked.append(url)
            await release.wait()
            return url.encode()

        monkeypatch.setattr("bough.multimodal.preparer.fetch", slow)
        count = 2 * AT_ONCE
        urls = [MediaSource("image", f"https://slow.example/{number}.png") for number in range(count)]
        prompts = [np.full(each, PLACE, dtype=np.int32) for each in (count, 1)]
        waiting = asyncio.create_task(preparer.prepare(prompts[0], urls))
        while len(asked) < AT_ONCE:
            await asyncio.sleep(0)
        assert (await preparer.prepare(prompts[1], [MediaSource("image", b"here")])).media.items
        assert len(asked) == AT_ONCE and not waiting.done()
        release.set()
        assert len((await waiting).media.items) == count

    asyncio.run(run())


def test_what_fails_leaves_no_file_and_is_tried_again(preparer: MediaPreparer) -> None:
    pool: Any = preparer._pool
    good = pool.answer

    def broken(task: Task) -> Prepared | str | None:
        Path(task.file).write_bytes(b"half")
        return "It is damaged." if task.content == b"bad" else None

    pool.answer = broken
    with pytest.raises(RequestError, match=r"It is damaged\.") as refused:
        prepare(preparer, b"bad")
    assert refused.value.field == "image_data" and refused.value.status_code == 400
    with pytest.raises(RequestError, match=r"more than 60 s \(--mm-timeout-s\) or too much memory"):
        prepare(preparer, b"hangs")
    assert preparer._folder is not None and not list(preparer._folder.iterdir())
    pool.answer = good
    assert prepare(preparer, b"bad").media.items


def test_counts_are_limited_before_anything_is_read(tmp_path: Path) -> None:
    for preparer in make(tmp_path, limit_mm_data_per_request='{"image": 2}'):
        with pytest.raises(RequestError, match=r"has 3 images; at most 2 are taken \(--limit-mm-data-per-request\)"):
            prepare(preparer, "http://127.0.0.1/a", "http://127.0.0.1/b", "!")
        with pytest.raises(RequestError, match="takes no recordings; leave audio_data out") as refused:
            prepare(preparer, MediaSource("audio", b"x"))
        assert refused.value.field == "audio_data"
    for preparer in make(tmp_path):
        with pytest.raises(RequestError, match="has 1000 images; at most 64"):
            prepare(preparer, *[b"x"] * 1000)


def test_a_missing_package_is_named(preparer: MediaPreparer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"PIL is missing.*bough\[multimodal\]"):
        prepare(preparer, b"x")


def test_there_are_no_fewer_media_than_none() -> None:
    check_media(MediaSettings(limit_mm_data_per_request='{"image": 0}'))
    with pytest.raises(SettingsError, match="--limit-mm-data-per-request has counts of 0 or more"):
        check_media(MediaSettings(limit_mm_data_per_request='{"image": -1}'))


@pytest.mark.parametrize("flag", ["limit_mm_data_per_request", "mm_process_config"])
def test_flags_are_checked_at_the_start(flag: str) -> None:
    for wrong in ("{", "[]", "3", '{"smell": 3}', '{"image": "many"}'):
        with pytest.raises(SettingsError, match=flag.replace("_", "-")):
            check_media(MediaSettings(**{flag: wrong}))
    check_media(MediaSettings(limit_mm_data_per_request='{"image": 3}', mm_process_config='{"video": {"fps": 1}}'))


def test_models_without_media_have_no_preparer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = tmp_path / "config.json"
    files = ModelFiles("tiny", tmp_path, config=config, tokenizer=tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text, settings, takes in (
        ('{"model_type": "llama"}', {}, False),
        ('{"model_type": "llava"}', {}, True),
        ('{"model_type": "llava"}', {"enable_multimodal": False}, False),
    ):
        config.write_text(text)
        client = NativeEngine(lambda message: [65]).client
        close = attach_media(client, files, Settings.from_flat(settings), tokenizer)
        assert (client.preparer is not None) == takes and client.media_kinds == ({"image"} if takes else set())
        close()


def test_what_a_crash_left_is_removed_at_the_next_start() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, alive = SHARED / f"bough-{ended.pid}-left", SHARED / f"bough-{os.getpid()}-alive"
    for folder in (left, alive):
        folder.mkdir(mode=0o700)
        (folder / "0").write_bytes(b"features")
    try:
        sweep_dead_owners()
        assert not left.exists() and alive.exists()
    finally:
        shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(alive)


# ---- the way of a request


def ask(preparer: MediaPreparer | None, *bodies: dict[str, Any]) -> tuple[list[Any], list[Generate]]:
    sent: list[Generate] = []

    def script(message: Generate) -> Any:
        sent.append(message)
        return [65]

    async def run() -> list[Any]:
        engine = NativeEngine(script)
        engine.client.preparer = preparer
        async with open_server(engine) as http:
            return [await http.post("/generate", json=body) for body in bodies]

    return asyncio.run(run()), sent


def test_generate_takes_media_of_one_prompt_and_of_many(preparer: MediaPreparer) -> None:
    data = base64.b64encode(b"picture").decode()
    one = {"input_ids": [1, PLACE, 2], "image_data": data, "sampling_params": {"max_new_tokens": 1}}
    many = {**one, "input_ids": [[1, PLACE, PLACE], [3], [PLACE]], "image_data": [[data, data], None, data]}
    mixed = {**one, "input_ids": [PLACE, PLACE], "image_data": [f"data:image/png;base64,{data}"]}
    answers, sent = ask(preparer, one, many, mixed, {**one, "stream": True})
    assert [answer.status_code for answer in answers] == [200, 200, 400, 200]
    assert "1 images, 2 placeholders" in answers[2].json()["error"]["message"]
    assert answers[2].json()["error"]["param"] == "image_data"
    counts = [0 if message.media is None else len(message.media.items) for message in sent]
    assert counts == [1, 2, 0, 1, 1]
    assert sent[0].media is not None and sent[3].media is not None
    assert sent[0].media.items[0].digest == sent[3].media.items[0].digest
    assert len(np.frombuffer(sent[0].input_ids, dtype=np.int32)) == 8
    with_error = ask(preparer, {**one, "image_data": "http://127.0.0.1:1/x.png"}, {**one, "image_data": ["x"] * 1000})[
        0
    ]
    assert [answer.status_code for answer in with_error] == [400, 400]
    assert "private address" in with_error[0].json()["error"]["message"]


def test_a_model_of_text_says_so() -> None:
    (answer,), sent = ask(None, {"text": "a", "image_data": "x"})
    assert answer.status_code == 400 and not sent
    assert answer.json()["error"]["message"] == "This model takes no images; leave image_data out."


def test_streams_go_on_while_media_are_prepared(preparer: MediaPreparer) -> None:
    async def run() -> None:
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        pool: Any = preparer._pool
        good = pool.answer

        def wait(task: Task) -> Prepared | str | None:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            return good(task)  # type: ignore[no-any-return]

        pool.answer = wait
        engine = NativeEngine(lambda message: [65])
        engine.client.preparer = preparer
        async with open_server(engine) as http:
            body = {"input_ids": [PLACE], "image_data": base64.b64encode(b"x").decode()}
            waiting = asyncio.create_task(http.post("/generate", json=body))
            assert (await http.post("/generate", json={"text": "a"})).status_code == 200
            assert not waiting.done()
            release.set()
            assert (await waiting).status_code == 200

    asyncio.run(run())


# ---- real processes


def real(folder: Path, **settings: Any) -> MediaPreparer:
    write_checkpoint(folder, "llava")
    given = MediaSettings(mm_processor_worker_num=1, mm_max_pixels=10**10, **settings)
    return MediaPreparer("llava", folder, folder, load_tokenizer(folder), given, RequestMeter())


@pytest.mark.slow
def test_a_worker_prepares_and_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    preparer = real(tmp_path)
    place = preparer._tokenizer.encode("<image>", add_special_tokens=False)
    try:
        (item,) = prepare(preparer, png(30, 30), ids=place).media.items
        assert item.count == 4 and Path(item.file).stat().st_mode & 0o777 == 0o600
        values = np.fromfile(item.file, dtype=item.features[0].dtype, count=3 * 28 * 28)
        assert item.features[0].shape == (1, 3, 28, 28) and np.isfinite(values).all()
        with pytest.raises(RequestError, match="cannot be decoded"):
            prepare(preparer, b"no picture", ids=place)
        bomb = io.BytesIO()
        np.lib.format.write_array_header_1_0(bomb, {"descr": "|u1", "fortran_order": False, "shape": (10**5, 10**5, 3)})
        with pytest.raises(RequestError, match="too much memory"):
            prepare(preparer, bomb.getvalue(), ids=place)
        (process,) = preparer._pool._running  # the same one, still
        assert prepare(preparer, png(31, 31), ids=place).media.items[0].count == 4
        folder = Path(item.file).parent
    finally:
        preparer.close()
    assert process._process.poll() is not None and not folder.exists()


@pytest.mark.slow
def test_the_time_in_which_a_worker_has_no_core_does_not_count(tmp_path: Path) -> None:
    preparer = real(tmp_path, mm_timeout_s=2.0)
    place = preparer._tokenizer.encode("<image>", add_special_tokens=False)
    try:
        preparer._pool.warm()
        (process,) = preparer._pool._running
        pid = process._process.pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(9.0, os.kill, (pid, signal.SIGCONT)).start()
        assert prepare(preparer, png(30, 30), ids=place).media.items[0].count == 4
    finally:
        preparer.close()


@pytest.mark.slow
def test_a_worker_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    preparer = real(tmp_path, mm_timeout_s=1e-5)
    try:
        with pytest.raises(RequestError, match=r"more than 1e-05 s \(--mm-timeout-s\)"):
            prepare(preparer, png(400, 400))
        assert not preparer._pool._running
    finally:
        preparer.close()
