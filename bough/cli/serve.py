"""`bough serve`: puts an engine behind HTTP. Keeps no state; the server itself is `bough.launch.service`."""

from collections.abc import Mapping, Sequence

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, settings_with_model
from bough.core.settings import Settings


def run(argv: Sequence[str]) -> int:
    settings = settings_of(argv)
    from bough.launch.service import serve

    serve(settings)
    return 0


def settings_of(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    about = "Serves a model over HTTP: SGLang's native API, OpenAI's, and more; /docs on the server lists all of it."
    parser = Parser(program="bough serve", usage="[MODEL]", about=about)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="same as --model-path")
    add_engine_flags(parser, server=True)
    return settings_with_model(parser.parse(argv), environ)
