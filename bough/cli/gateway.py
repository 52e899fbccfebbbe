"""`bough gateway`: many engines behind one address; `roll` and `top` talk to one that runs.

Flags are derived from `GatewaySettings`; what stands behind `--` are flags of the engines that `--launch` starts.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from bough.cli.commands import Parser, without_keys
from bough.cli.flags import add_setting, checked
from bough.cli.serve import settings_of
from bough.core.custom_code import check_server_code
from bough.core.errors import SettingsError
from bough.core.files import table_beside
from bough.core.gateway_settings import BOOTSTRAP_PORT, GatewaySettings, gateway_fields

ENVIRONMENT_PREFIX = "BOUGH_GATEWAY_"
KEY_VARIABLE = ENVIRONMENT_PREFIX + "API_KEY"
ADMIN_KEY_VARIABLE = ENVIRONMENT_PREFIX + "ADMIN_API_KEY"
WORKER_KEY_VARIABLE = ENVIRONMENT_PREFIX + "WORKER_API_KEY"
DEFAULT_URL = "http://127.0.0.1:30000"
ROUTER_FLAGS = table_beside(__file__, "router_flags.toml")


def run(argv: Sequence[str]) -> int:
    if argv and argv[0] in CLIENT_COMMANDS:
        return CLIENT_COMMANDS[argv[0]](argv[1:])
    end = list(argv).index("--") if "--" in argv else len(argv)
    for instead, flags in ROUTER_FLAGS["refused"].items():
        if found := {f"--{flag}" for flag in flags.split()}.intersection(word.partition("=")[0] for word in argv[:end]):
            raise SettingsError(f"{min(found)} is not here: {instead}.")
    settings = settings_from(_parser().parse(argv[:end]), tuple(argv[end + 1 :]))
    from bough.gateway.service import run_gateway

    run_gateway(settings)
    return 0


def _roll(argv: Sequence[str]) -> int:
    parser = _client_parser("roll", "Replaces the workers of a running gateway one by one; no request fails.")
    key = {"default": os.environ.get(WORKER_KEY_VARIABLE)}
    parser.add_flags(replace={"metavar": ("OLD", "NEW")}, worker_api_key=key)
    parsed = parser.parse(argv)
    from bough.gateway.commands import AdminClient, roll

    client = AdminClient(parsed.url, parsed.api_key)
    roll(client, parsed.replace, parsed.timeout_s, worker_api_key=parsed.worker_api_key)
    return 0


def _top(argv: Sequence[str]) -> int:
    parser = _client_parser("top", "A live table of a running gateway's workers.")
    parser.add_flags()
    parsed = parser.parse(argv)
    from bough.gateway.commands import AdminClient, show

    show(AdminClient(parsed.url, parsed.api_key), parsed.interval_s, parsed.rounds)
    return 0


CLIENT_COMMANDS = {"roll": _roll, "top": _top}


def _client_parser(name: str, about: str) -> Parser:
    parser = Parser(program=f"bough gateway {name}", about=about)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the gateway's address (default: {DEFAULT_URL})")
    key = os.environ.get(ADMIN_KEY_VARIABLE) or os.environ.get(KEY_VARIABLE)
    parser.add_argument("--api-key", default=key, help=f"its admin key; also {ADMIN_KEY_VARIABLE} or {KEY_VARIABLE}")
    return parser


def _parser() -> Parser:
    parser = Parser(
        program="bough gateway",
        usage="[--worker-urls URL …]",
        subcommands=tuple(CLIENT_COMMANDS),
        other_flags=" Flags of the engines that --launch starts go behind `--`.",
        about="Puts any number of engines behind one address and routes each request to where its prefix is cached. "
        "`bough gateway roll` restarts the workers of a running gateway one by one, `bough gateway top` shows them.",
    )
    section = parser.add_argument_group("Gateway", "Each flag is also a variable, such as BOUGH_GATEWAY_POLICY.")
    parser.add_flags(section, prefill={"metavar": ("URL", "BOOTSTRAP_PORT")})
    for f in gateway_fields():
        add_setting(section, f, f.default)
    quiet: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    read: dict[str, dict[str, Any]] = {"max-payload-size": {"type": whole_mib}, "cors-allowed-origins": {"nargs": "+"}}
    for flag, name in ROUTER_FLAGS["same"].items():
        section.add_argument(f"--{flag}", dest=name, **read.get(flag, {}), **quiet)
    for flag, (name, value) in ROUTER_FLAGS["fixed"].items():
        section.add_argument(f"--{flag}", dest=name, action="store_const", const=value, **quiet)
    for flag, only in ROUTER_FLAGS["only"].items():
        section.add_argument(f"--{flag}", choices=[only], **quiet)
    return parser


def whole_mib(text: str) -> int:
    return -(-int(text) >> 20)


def settings_from(
    parsed: argparse.Namespace, engine_flags: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> GatewaySettings:
    """All settings; flags win over variables, those over the file."""
    environ = os.environ if environ is None else environ
    config = parsed.config or environ.get(ENVIRONMENT_PREFIX + "CONFIG") or None
    given = _given(parsed, environ)
    keys = tuple(parsed.api_key) or tuple(filter(None, [environ.get(KEY_VARIABLE)]))
    if any(not key.strip() for key in keys):
        raise SettingsError("--api-key is empty, which would guard nothing; give a key, or leave it out.")
    from bough.gateway.config_file import FileContent, read_file

    # The file's workers, policies and keys are taken by the gateway itself, and watched.
    content = FileContent() if config is None else read_file(config)
    settings = content.settings | given
    if settings.get("launch"):
        settings["engine"] = settings_of(engine_flags, environ)
        check_server_code(settings["engine"], keyed=bool(keys or content.api_keys))
    elif engine_flags:
        words = " ".join(without_keys(engine_flags))
        problem = f"What stands behind `--` ({words}) is for engines that the gateway starts"
        raise SettingsError(f"{problem}: add --launch N, or leave it out.")
    in_file = settings.pop("selector", ())
    prefill = tuple(_prefill(words) for words in parsed.prefill)
    if (prefill or parsed.decode) and not settings.get("pd_disaggregation"):
        raise SettingsError("--prefill and --decode are for --pd-disaggregation; add it, or use --worker-urls.")
    return GatewaySettings(
        **settings,
        worker_urls=(*parsed.decode, *parsed.worker_urls) or _words(environ, "WORKER_URLS"),
        prefill=prefill,
        api_keys=keys,
        selector=tuple(parsed.selector) or _words(environ, "SELECTOR") or in_file,
        config=config,
        given=tuple(given),
        engine_flags=engine_flags,
    )


def _prefill(words: Sequence[str]) -> tuple[str, int]:
    url, port = words[0], [word.lower() for word in words[1:]]
    if len(port) > 1 or not all(word == "none" or (word.isdecimal() and 0 < int(word) < 65536) for word in port):
        raise SettingsError(f"--prefill takes a URL and perhaps a port; repeat it. Got {' '.join(words)}.")
    return url, int(port[0]) if port and port[0] != "none" else BOOTSTRAP_PORT


def _words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """A variable of several values, with spaces or commas between them."""
    return tuple(environ.get(ENVIRONMENT_PREFIX + name, "").replace(",", " ").split())


def _given(parsed: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for f in gateway_fields():
        variable = ENVIRONMENT_PREFIX + f.name.upper()
        text = vars(parsed).get(f.name, environ.get(variable) or None)
        if text is not None:
            found[f.name] = checked(f, ",".join(text) if isinstance(text, list) else text)
    return found
