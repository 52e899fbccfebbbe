"""One engine in parts that are the same whoever uses it: its model's files, its sockets, its processes.

Made and started in steps, so that each user can do other things in between: the offline engine in its caller's thread,
the server beside its event loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bough.core.custom_code import load_dill
from bough.core.errors import BoughError, SettingsError
from bough.core.files import SHARED
from bough.core.settings import Settings
from bough.launch.disaggregation import check_disaggregation
from bough.launch.head import Head
from bough.launch.nodes import check_nodes
from bough.launch.parts import check_adapters, check_media, check_model, check_ranks, open_tokenizer
from bough.launch.spec import MODEL_EXECUTOR, ChildSpec, Role
from bough.launch.supervisor import Supervisor
from bough.loader.locate import find_files
from bough.messages.channels import Addresses
from bough.server.model_info import ModelInfo
from bough.tokenizer.chat_template import given_template, template_defaults

if TYPE_CHECKING:
    from bough.tokenizer.tokenizer import Tokenizer

FOLDER_PREFIX = "bough-"
FOLDER_NAME = re.compile(rf"{FOLDER_PREFIX}(\d{{1,9}})-\w+")  # its owner: one that was killed could not remove it


class EngineProcesses:
    """Finds the model (and fetches it, where it must) when made; `start` begins the processes."""

    def __init__(
        self, settings: Settings, cleanup: contextlib.ExitStack, clients: int = 1, executor: str = MODEL_EXECUTOR
    ) -> None:
        self.settings = settings
        if settings.model.chat_template is not None:
            given_template(settings.model.chat_template)  # a wrong one is reported before a model is fetched or loaded
        template_defaults(settings.model.default_chat_template_kwargs)
        if settings.scheduler.enable_custom_logit_processor:
            load_dill()
        parallel = settings.parallel
        if parallel.dp_size > 1 and settings.memory.kv_events_config is not None:
            raise SettingsError(
                "--kv-events-config tells of the cache of one scheduler; leave it out with --dp-size, or run that many "
                "servers behind `bough gateway`."
            )
        if parallel.groups > 1 and (parallel.tp_size % parallel.groups or parallel.pp_size > 1):
            raise SettingsError(
                f"--enable-dp-attention runs attention in --dp-size {parallel.groups} groups of ranks; use a number "
                f"that divides --tp-size {parallel.tp_size}, and leave out --pp-size: groups run each step together."
            )
        memory = settings.memory
        if memory.enable_hierarchical_cache and memory.disable_radix_cache:
            raise SettingsError("--enable-hierarchical-cache keeps shared prefixes; leave out --disable-radix-cache.")
        if memory.hicache_storage_backend and not (parallel.pp_size == 1 and memory.enable_hierarchical_cache):
            raise SettingsError(
                "--hicache-storage-backend needs --enable-hierarchical-cache, and all layers of a page in one stage; "
                "leave out --pp-size."
            )
        check_nodes(parallel)
        check_disaggregation(settings)
        check_adapters(settings)
        check_media(settings.media)
        if parallel.node_rank:
            raise SettingsError("Only the first host has an engine; start the others with `bough serve --node-rank N`.")
        self._executor = executor
        self.supervisor = Supervisor()
        self.files = find_files(settings.model)
        check_ranks(self.files, settings)
        folder = open_socket_folder(cleanup)
        self.addresses = [Addresses.in_folder(folder, clients, parallel.replica_ranks)]
        if parallel.dp_size > 1:
            folders = [folder / f"dp{number}" for number in range(parallel.dp_size)]
            for own in folders:
                own.mkdir()
            self.addresses = [Addresses.in_folder(folder, clients, parallel.replica_ranks, own) for own in folders]
        self._head = None
        if parallel.nnodes > 1:
            self._head = Head(settings, self.files, cleanup)
            self.addresses = [self._head.place(*self.addresses)]
        self.replica_limits: list[dict[str, Any]] = [{}]  # what each scheduler announced when it was ready

    def start(self) -> None:
        if self._head is not None:
            self._head.watch(self.supervisor)
        self.supervisor.start([spec for number in range(len(self.addresses)) for spec in self._specs(number)])

    def _specs(self, number: int) -> list[ChildSpec]:
        """The processes of one replica."""
        flat, several = self.settings.to_flat(), len(self.addresses) > 1
        here = self.settings.parallel.replica_ranks // self.settings.parallel.nnodes
        roles: list[tuple[Role, int]] = [("scheduler", 0), ("detokenizer", 0)]
        roles += [("executor", rank) for rank in range(1, here)]
        place: dict[str, Any] = {"executor": self._executor, "dp_rank": number if several else None}
        place["beside"] = tuple(each.scheduler for each in self.addresses if each != self.addresses[number])
        specs = [ChildSpec(role, flat, self.addresses[number], self.files, rank=rank, **place) for role, rank in roles]
        return specs if self._head is None else [self._head.equip(specs[0]), *specs[1:]]

    def open_tokenizer(self) -> Tokenizer | None:
        """Done while the children load, so it costs the start no time. A model that cannot be served often lacks a
        tokenizer too; the user shall hear of what matters more."""
        try:
            check_model(self.files, self.settings.model)
            return open_tokenizer(self.files, self.settings.model)
        except BoughError as error:
            raise self.supervisor.error or error from None

    def wait_until_ready(self) -> None:
        ready = self.supervisor.wait_until_ready(self.settings.process.start_timeout_s)
        specs = [self._specs(number) for number in range(len(self.addresses))]
        self.replica_limits = [ready[first.title] for first, *_ in specs]

    @property
    def limits(self) -> dict[str, Any]:
        """What the first scheduler announced."""
        return self.replica_limits[0]

    @property
    def served_model_name(self) -> str:
        return self.settings.model.served_model_name or self.files.name

    def describe(self) -> ModelInfo:
        """What is served; known once it is ready."""
        path = str(self.files.gguf or self.files.folder)
        return ModelInfo(
            name=self.served_model_name,
            path=path,
            tokenizer_path=self.settings.model.tokenizer_path or path,
            architecture=self.limits["architecture"],
            context_length=self.limits["context_length"],
            vocab_size=self.limits["vocab_size"],
            created=int(time.time()),
            limits=self.limits,
            replica_limits=self.replica_limits,
        )


def open_socket_folder(cleanup: contextlib.ExitStack) -> Path:
    """A new folder, private to the user: a user who can open the sockets can use the engine. It goes with `cleanup`."""
    sweep_dead_owners()
    folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-")
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def sweep_dead_owners() -> None:
    for path in (path for place in (tempfile.gettempdir(), SHARED) for path in Path(place).glob(f"{FOLDER_PREFIX}*")):
        match = FOLDER_NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):  # another engine has just swept it
            ours = stat.S_ISDIR(path.lstat().st_mode) and path.lstat().st_uid == os.getuid()
            if match and ours and not psutil.pid_exists(int(match[1])):
                shutil.rmtree(path, ignore_errors=True)
