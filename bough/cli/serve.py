"""`bough serve`: puts an engine behind HTTP. Keeps no state; the server itself is `bough.launch.service`."""

from collections.abc import Sequence

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, settings_with_model


def run(argv: Sequence[str]) -> int:
    about = "Serves a model over HTTP: SGLang's native API, OpenAI's, and more; /docs on the server lists all of it."
    parser = Parser(program="bough serve", usage="[MODEL]", about=about)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="same as --model-path")
    add_engine_flags(parser, server=True)
    parsed = parser.parse(argv)
    settings = settings_with_model(parsed)
    from bough.launch.service import serve

    serve(settings)
    return 0
