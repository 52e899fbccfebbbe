"""The process in which recordings are decoded: what strangers send meets FFmpeg here, with limits on memory and time,
and no other request suffers when that fails. A message is a file, or empty to go on with the last one; an answer is
what comes of some minutes of it, so that neither depends on how long the recording is."""

import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import msgspec

from bough.core.errors import RequestError
from bough.core.pipe_process import answer_all
from bough.speech.sound import MINUTE, SHORT, Window, windows_of

MEMORY_BYTES = 3 << 30  # beyond what the libraries themselves occupy: the largest file several times
TIMEOUT_S = 120
Part = list[Window | int | None]  # of what `windows_of` finds; None: that was all


def answering(blocks: int, goes_on: bool) -> Callable[[bytes], bytes]:
    """Answers with the next `Part`, or why there is none; the first one is all of a short recording."""
    found: Iterator[Window | int] | None = None

    def answer(message: bytes) -> bytes:
        nonlocal found
        part, work, found = Part(), 0, windows_of(message, blocks) if message else found
        try:
            for each in found or ():
                part.append(each)
                work += MINUTE if isinstance(each, int) else len(each.samples) // 4
                if work > 2 * SHORT:
                    break
            else:
                part += [None] if found else []  # nothing where the process that had the file was killed
        except RequestError as error:
            return msgspec.msgpack.encode(f"{error.status_code} {error.message}")
        found = found if goes_on else None
        return msgspec.msgpack.encode(part)

    return answer


def read_answer(answer: bytes | None) -> Part:
    if answer is None:
        raise RequestError(f"file takes more than {TIMEOUT_S} s, or too much memory, to decode; cut it.", field="file")
    outcome = msgspec.msgpack.decode(answer, type=Part | str)
    if isinstance(outcome, str):
        status, _, reason = outcome.partition(" ")
        raise RequestError(reason, status_code=int(status), field="file")
    return outcome


if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    answer_all(connection, answering(*msgspec.msgpack.decode(connection.recv_bytes())), MEMORY_BYTES, TIMEOUT_S)
