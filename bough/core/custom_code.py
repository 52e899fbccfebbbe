"""Code that requests bring along (`--enable-custom-logit-processor`): what must hold before anything is started.

A client that may send such a request may run anything in the engine's process. A server therefore takes it only from
clients with its key. The offline engine's one caller is the process that it belongs to: it could run the code itself.
"""

from types import ModuleType

from bough.core.errors import SettingsError
from bough.core.settings import Settings


def check_server_code(settings: Settings, *, keyed: bool) -> None:
    """Raises where anybody who reaches a server, or the gateway that starts it, could run code in it, or nobody could.
    `keyed`: clients need a key; the one that a gateway draws for its engines is not theirs."""
    if not settings.scheduler.enable_custom_logit_processor:
        return
    if not keyed:
        text = "--enable-custom-logit-processor lets any client run any code in the engine"
        raise SettingsError(f"{text}; add --api-key, so that only clients with the key do.")
    load_dill()


def load_dill() -> ModuleType:
    try:
        import dill
    except ModuleNotFoundError:
        text = "Custom logit processors need dill; install it with `pip install 'bough[custom-logit-processor]'`."
        raise SettingsError(text) from None
    module: ModuleType = dill
    return module
