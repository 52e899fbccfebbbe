"""The start of an engine that computes prompts for others, or has them computed."""

from __future__ import annotations

import os
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bough.core.errors import SettingsError
from bough.core.settings import Settings
from bough.launch.spec import ChildSpec
from bough.loader.locate import fingerprint
from bough.messages.channels import KEY_VARIABLE, TCP, cluster_key
from bough.messages.requests import Bootstrap

if TYPE_CHECKING:
    import zmq

    from bough.core.plan import Executor, Limits
    from bough.disaggregation.transports import Device
    from bough.messages.channels import Receiver
    from bough.scheduler.handover import Handover
    from bough.scheduler.ports import Inbox, Outbox

    Ends = tuple[Receiver[Any], Outbox]

LOCAL = ("127.0.0.1", "localhost", "::1")


def check_disaggregation(settings: Settings) -> None:
    """Refuses what cannot work, before anything is loaded."""
    chosen, parallel = settings.disaggregation, settings.parallel
    mode = chosen.disaggregation_mode
    if chosen.prefill_url is not None and mode not in ("decode", "auto"):
        raise SettingsError("--prefill-url is for --disaggregation-mode decode or auto.")
    if chosen.prefill_url is None and mode == "auto":
        raise SettingsError("--disaggregation-mode auto needs --prefill-url: the engine that helps when it is busy.")
    if mode == "null":
        return
    if parallel.dp_size > 1 or parallel.pp_size > 1 or parallel.nnodes > 1:
        wrong = f"--disaggregation-mode {mode} is for engines without --dp-size, --pp-size and --nnodes"
        raise SettingsError(f"{wrong}; run several behind `bough gateway --pd-disaggregation`.")
    if mode != "prefill" and settings.memory.disable_radix_cache:
        raise SettingsError(f"--disaggregation-mode {mode} keeps what arrives in the radix cache; leave it on.")
    backend = chosen.disaggregation_transfer_backend
    if backend in ("nixl", "mooncake") and find_spec(backend) is None:
        raise SettingsError(f"--disaggregation-transfer-backend {backend} needs `pip install 'bough[{backend}]'`.")
    home_of(settings)
    key_of(settings)


def key_of(settings: Settings) -> str | None:
    """The cluster's key. Between engines of one host the API key will do, or none."""
    host, listens = settings.server.host, settings.disaggregation.disaggregation_mode == "prefill"
    if not os.environ.get(KEY_VARIABLE) and (host in LOCAL or not listens):
        return settings.server.api_key
    return cluster_key()


def home_of(settings: Settings) -> Bootstrap | None:
    """The prefill engine of `--prefill-url`."""
    url = settings.disaggregation.prefill_url
    if url is None:
        return None
    host = urlsplit(url if "://" in url else f"http://{url}").hostname
    if not host:
        raise SettingsError(f"--prefill-url looks like http://host:port; got {url!r}.")
    return Bootstrap(host, settings.disaggregation.disaggregation_bootstrap_port)


def open_handover(
    spec: ChildSpec, settings: Settings, executor: Executor, context: zmq.Context[Any], ends: Ends
) -> tuple[Handover, Inbox, Outbox]:
    """This engine's side of a pair, and between what its scheduler stands then."""
    chosen, (inbox, outbox) = settings.disaggregation, ends
    from bough.disaggregation.decode import DecodeSide
    from bough.disaggregation.link import Link, PairInbox
    from bough.disaggregation.prefill import PrefillSide
    from bough.disaggregation.transports import open_transport
    from bough.disaggregation.wire import Identity, ToDecode, ToPrefill

    limits = executor.limits()
    if limits.page_size > 1 and any(group.kind == "state" for group in limits.groups):
        raise SettingsError("Recurrent states are handed over behind whole prompts; use --page-size 1 with this model.")
    kinds = tuple(f"{group.kind} {group.window or ''}".strip() for group in limits.groups)
    model = f"{settings.model.model_shape or fingerprint(spec.files)} {settings.model.json_model_override_args}"
    path = settings.memory.quantization_param_path
    scales = "the model's" if path is None else sha256(Path(path).read_bytes()).hexdigest()
    layout = (limits.page_size, limits.page_bytes, kinds, limits.ranks, scales)
    identity, silence_s = Identity(model, limits.cache_dtype, *layout), chosen.disaggregation_peer_timeout_s
    transport = open_transport(chosen.disaggregation_transfer_backend, *device_memory(settings, limits))
    if chosen.disaggregation_mode == "prefill":
        host = "127.0.0.1" if settings.server.host == "localhost" else settings.server.host
        where = f"{TCP}{f'[{host}]' if ':' in host else host}:{chosen.disaggregation_bootstrap_port}"
        link = Link(context, ToPrefill, silence_s, key_of(settings), where)
        side = PrefillSide(executor, outbox, link, identity, chosen, transport)
        return side, PairInbox(inbox, link, side), side
    link = Link(context, ToDecode, silence_s, key_of(settings))
    taker = DecodeSide(executor, outbox, link, identity, chosen, transport, home=home_of(settings))
    return taker, PairInbox(inbox, link, taker), outbox


def device_memory(settings: Settings, limits: Limits) -> tuple[Device | None, int]:
    """For pages that stay on GPUs on their way, and how much of it; None where they do not."""
    from bough.distributed.cuda_ipc import PageMemory
    from bough.executor.build import resolve_device

    chosen = settings.disaggregation
    if not chosen.device_chunks or limits.ranks > 1 or resolve_device(settings.model).type == "cpu":
        if chosen.disaggregation_transfer_backend == "cuda_ipc":
            raise SettingsError("--disaggregation-transfer-backend cuda_ipc needs a GPU, and one alone; use auto.")
        return None, 0
    return PageMemory(), chosen.device_chunks * limits.chunk_tokens // limits.page_size * limits.copied_bytes(0)
