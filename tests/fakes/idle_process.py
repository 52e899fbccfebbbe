"""A process that sends messages back, but for three: `stop` and `pause` make it hang, `compute` makes it loop."""

import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            if message == b"stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            while message == b"compute":
                pass
            if message == b"pause":
                signal.pause()
            connection.send_bytes(message)
