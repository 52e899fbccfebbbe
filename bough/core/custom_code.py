"""Code that requests bring along (`--enable-custom-logit-processor`): what must hold before anything is started.

A client that may send such a request may run anything in the engine's process. A server therefore takes it only from
clients with its key. The offline engine's one caller is the process that it belongs to: it could run the code itself.
"""

from collections.abc import Sequence
from types import ModuleType

from bough.core.errors import SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.core.settings import Settings


def check_server_code(settings: Settings) -> None:
    """Raises where anybody who reaches a server could run code in it, or nobody could."""
    if not settings.scheduler.enable_custom_logit_processor:
        return
    if settings.server.api_key is None:
        text = "--enable-custom-logit-processor lets any client run any code in this server"
        raise SettingsError(f"{text}; add --api-key (or BOUGH_API_KEY), so that only clients with the key do.")
    load_dill()


def check_gateway_code(settings: GatewaySettings, more_keys: Sequence[object] = ()) -> None:
    """The same of a gateway: the engines that it starts have a key, but that is its own and no client needs it."""
    if settings.engine.scheduler.enable_custom_logit_processor and not (settings.api_keys or more_keys):
        text = "--enable-custom-logit-processor lets any client of this gateway run any code in its engines"
        raise SettingsError(f"{text}; give the gateway --api-key (or BOUGH_GATEWAY_API_KEY, or api_keys in its file).")


def load_dill() -> ModuleType:
    try:
        import dill
    except ModuleNotFoundError:
        text = "Custom logit processors need dill; install it with `pip install 'bough[custom-logit-processor]'`."
        raise SettingsError(text) from None
    module: ModuleType = dill
    return module
