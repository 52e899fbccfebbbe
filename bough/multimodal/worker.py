"""The process in which media are decoded and prepared: what comes from outside meets its decoders here, with a limit on
memory and time, and no other request suffers when they fail. It answers one task after the other, as msgpack.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bough.core.errors import BoughError, RequestError
from bough.core.media import Feature, MediaKind
from bough.multimodal.decoding import Limits, decode_audio, decode_image, decode_video
from bough.multimodal.families import Family, Result, place_of
from bough.tokenizer.load import load_tokenizer
from bough.tokenizer.tokenizer import Tokenizer

MEMORY_BYTES = 4 << 30  # beyond what the libraries themselves occupy
ALIGNMENT = 64  # of an array in its file, in bytes


class Hello(msgspec.Struct, frozen=True):
    folder: str  # of the checkpoint
    tokenizer: str
    options: dict[str, dict[str, Any]]  # by kind
    limits: Limits
    timeout_s: float


class Task(msgspec.Struct, frozen=True):
    kind: MediaKind
    content: bytes
    file: str  # that gets the arrays
    detail: str | None = None
    num_frames: int | None = None
    alone: bool = True


class Prepared(msgspec.Struct, frozen=True):
    """An item as its place in a prompt needs it: `ids` without the line breaks around them, which the tokenizer may join
    with others."""

    features: tuple[Feature, ...]
    nbytes: int
    ids: bytes  # int32
    place: int  # the token that stands for an item in a prompt
    row: int  # the one that stands for a row of the encoder, in `ids`
    before: str = ""
    after: str = ""
    grid: tuple[int, int, int] | None = None
    interval: float = 1.0


class Outcome(msgspec.Struct, frozen=True):
    prepared: Prepared | None = None
    error: str | None = None


class Worker:
    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._tokenizer: Tokenizer = load_tokenizer(Path(hello.tokenizer))
        self._family = Family(Path(hello.folder), self._tokenizer, hello.options)

    def prepare(self, task: Task) -> Prepared:
        place, row = place_of(self._family, task.kind, self._tokenizer)
        result = self._result(task)
        features, nbytes = write_features(task.file, result.arrays)
        text = result.text.strip("\n")
        before, _, after = result.text.partition(text)
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32).tobytes()
        return Prepared(features, nbytes, ids, place, row, before, after, result.grid, result.interval)

    def _result(self, task: Task) -> Result:
        family, limits = self._family, self._hello.limits
        match task.kind:
            case "image":
                return family.image(decode_image(task.content, limits, task.detail), alone=task.alone)
            case "video":
                frames = task.num_frames
                clip = decode_video(
                    task.content, limits, lambda total, fps: family.choose_frames(total, fps, frames), family.fit_frame
                )
                return family.video(clip)
            case "audio":
                return family.audio(decode_audio(task.content, limits, family.rate))


def write_features(path: str, arrays: dict[str, Any]) -> tuple[tuple[Feature, ...], int]:
    """One behind the other, in a file that nobody else can read."""
    features, offset = [], 0
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        for name, value in arrays.items():
            array = np.ascontiguousarray(value)
            file.seek(offset)
            file.write(array.data)
            features.append(Feature(name, array.dtype.name, array.shape, offset))
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        file.truncate(offset)
    return tuple(features), offset


def outcome_of(worker: Worker, task: Task) -> Outcome:
    try:
        return Outcome(worker.prepare(task))
    except RequestError as error:
        return Outcome(error=str(error))
    except MemoryError:
        return Outcome(error=f"The {task.kind} needs too much memory to prepare; send a smaller one.")
    except OSError as error:
        advice = "make /dev/shm larger, or lower --mm-preprocess-cache-size-mb"
        return Outcome(error=f"There is no room for prepared media ({error.strerror}); {advice}.")
    except ValueError as error:  # of a processor, which refuses sizes and shapes
        return Outcome(error=f"The model's processor does not take this {task.kind}: {error}")
    except Exception as error:  # noqa: BLE001  (a defect, which must not stay unseen, concerns one request alone)
        traceback.print_exc()
        return Outcome(error=f"The {task.kind} cannot be prepared ({type(error).__name__}: {error}); please report it.")


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    hello = msgspec.msgpack.decode(connection.recv_bytes(), type=Hello)
    os.nice(5)  # the model goes first
    os.environ["OMP_NUM_THREADS"] = "1"  # there are several workers
    worker = Worker(hello)
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send_bytes(b"")
    while True:
        task = msgspec.msgpack.decode(connection.recv_bytes(), type=Task)
        signal.setitimer(signal.ITIMER_REAL, hello.timeout_s)  # ends the process
        outcome = outcome_of(worker, task)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        connection.send_bytes(msgspec.msgpack.encode(outcome))


if __name__ == "__main__":
    try:
        main()
    except EOFError:
        pass  # the engine has ended
    except (BoughError, ImportError, OSError) as error:
        raise SystemExit(f"Media cannot be prepared: {error}") from None
