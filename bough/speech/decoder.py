"""The process in which recordings are decoded: what strangers send meets FFmpeg here, with limits on memory and time,
and no other request suffers when that fails. It answers one file after the other."""

import sys
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from bough.core.errors import RequestError
from bough.core.pipe_process import answer_all
from bough.speech.sound import FloatArray, decode

MEMORY_BYTES = 3 << 30  # beyond what the libraries themselves occupy: two hours of samples several times
TIMEOUT_S = 120


def answer_to(file: bytes) -> bytes:
    """The samples, or why there are none."""
    try:
        return msgspec.msgpack.encode(decode(file).tobytes())
    except RequestError as error:
        return msgspec.msgpack.encode((error.message, error.status_code))


def read_answer(answer: bytes | None) -> FloatArray:
    if answer is None:
        raise RequestError(f"file takes more than {TIMEOUT_S} s, or too much memory, to decode; cut it.", field="file")
    outcome = msgspec.msgpack.decode(answer, type=bytes | tuple[str, int])
    if isinstance(outcome, tuple):
        raise RequestError(outcome[0], status_code=outcome[1], field="file")
    return np.frombuffer(outcome, dtype=np.float32)


if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    connection.recv_bytes()  # a hello that says nothing
    answer_all(connection, answer_to, MEMORY_BYTES, TIMEOUT_S)
