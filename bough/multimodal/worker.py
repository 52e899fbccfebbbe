"""The process in which media are decoded and prepared: what comes from outside meets its decoders here, with limits on
memory and time, and no other request suffers when they fail. It answers one task after the other, as msgpack.
"""

import os
import sys
import traceback
from multiprocessing.connection import Connection

import msgspec

from bough.core.errors import BoughError, RequestError
from bough.core.pipe_process import answer_all
from bough.multimodal.families import Family, Hello, Prepared, Task

MEMORY_BYTES = 4 << 30  # beyond what the libraries themselves occupy


def outcome_of(family: Family, task: Task) -> Prepared | str:
    """What came of it, or why nothing did."""
    try:
        return family.prepare(task)
    except RequestError as error:
        return str(error)
    except MemoryError:
        return f"The {task.kind} needs too much memory to prepare; send a smaller one."
    except OSError as error:
        advice = "make /dev/shm larger, or lower --mm-preprocess-cache-size-mb"
        return f"There is no room for prepared media ({error.strerror}); {advice}."
    except Exception as error:  # noqa: BLE001  (processors refuse sizes and shapes with errors of many kinds)
        traceback.print_exc()
        return f"The model's processor does not take this {task.kind}: {error}"


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    hello = msgspec.msgpack.decode(connection.recv_bytes(), type=Hello)
    # No family needs torch here: without it a worker starts in a third of the time, with a fifth of the memory.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would tell that torch is missing
    family = Family(hello)

    def answer(message: bytes) -> bytes:
        return msgspec.msgpack.encode(outcome_of(family, msgspec.msgpack.decode(message, type=Task)))

    answer_all(connection, answer, MEMORY_BYTES, hello.timeout_s)


if __name__ == "__main__":
    try:
        main()
    except (BoughError, ImportError, OSError) as error:
        raise SystemExit(f"Media cannot be prepared: {error}") from None
