"""`bough store`: the server of `--hicache-storage-backend memory`."""

from bough.cli.commands import Parser
from bough.observability.logs import set_up_logging
from bough.storage.memory import MemoryServer


def run(argv: list[str]) -> int:
    parser = Parser(program="bough store", about="Keeps KV pages for engines with the same BOUGH_CLUSTER_KEY.")
    parser.add_flags()
    parsed = parser.parse(argv)
    set_up_logging("store", "info")
    url = f"ipc://{parsed.uds}" if parsed.uds else f"tcp://{parsed.host}:{parsed.port}"
    MemoryServer(url, parsed.max_bytes).serve()
    return 0
