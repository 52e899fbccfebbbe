"""`bough store`: the server of `--hicache-storage-backend memory`."""

from bough.cli.commands import Parser
from bough.observability.logs import set_up_logging
from bough.storage.memory import MemoryServer


def run(argv: list[str]) -> int:
    parser = Parser(program="bough store", about="Keeps KV pages for engines with the same BOUGH_CLUSTER_KEY.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=30100, metavar="N", help="port to listen on (default: 30100)")
    parser.add_argument("--uds", metavar="PATH", help="unix socket to listen on instead: faster, for engines beside it")
    parser.add_argument("--max-bytes", type=int, default=8 << 30, metavar="N", help="most it keeps (default: 8 GiB)")
    parsed = parser.parse(argv)
    set_up_logging("store", "info")
    url = f"ipc://{parsed.uds}" if parsed.uds else f"tcp://{parsed.host}:{parsed.port}"
    MemoryServer(url, parsed.max_bytes).serve()
    return 0
