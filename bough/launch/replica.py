"""One engine in parts that are the same whoever uses it: its model's files, its sockets, its processes.

Made and started in steps, so that each user can do other things in between: the offline engine in its caller's thread,
the server beside its event loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.core.custom_code import load_dill
from bough.core.errors import BoughError, EngineDeadError, SettingsError
from bough.core.settings import Settings
from bough.launch.head import Head
from bough.launch.nodes import check_nodes
from bough.launch.parts import check_model, input_reader, open_tokenizer
from bough.launch.spec import MODEL_EXECUTOR, ChildSpec
from bough.launch.supervisor import Supervisor
from bough.loader.locate import find_files
from bough.messages.channels import Addresses
from bough.server.model_info import ModelInfo
from bough.tokenizer.chat_template import given_template, template_defaults

if TYPE_CHECKING:
    from bough.client.inputs import InputReader
    from bough.tokenizer.tokenizer import Tokenizer

FOLDER_PREFIX = "bough-"
FOLDER_NAME = re.compile(rf"{FOLDER_PREFIX}(\d+)-\w+")  # its owner: one that was killed could not remove it


class Replica:
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
        check_nodes(settings.parallel)
        if settings.parallel.node_rank:
            raise SettingsError("Only the first host has an engine; start the others with `bough serve --node-rank N`.")
        self._executor = executor
        self.files = find_files(settings.model)
        self.addresses = Addresses.in_folder(open_socket_folder(cleanup), clients, settings.parallel.ranks)
        self._head = None
        if settings.parallel.nnodes > 1:
            self._head = Head(settings, self.files, cleanup)
            self.addresses = self._head.place(self.addresses)
        self.limits: dict[str, Any] = {}  # what the scheduler announced when it was ready

    def supervise(self, on_death: Callable[[EngineDeadError], None]) -> Supervisor:
        self.supervisor = Supervisor(on_death)
        if self._head is not None:
            self._head.watch(self.supervisor)
        return self.supervisor

    def start(self) -> None:
        flat = self.settings.to_flat()
        spec = ChildSpec("scheduler", flat, self.addresses, self.files, executor=self._executor)
        ranks = range(1, self.settings.parallel.ranks_per_node)
        others = [replace(spec, role="detokenizer")]
        others += [replace(spec, role="executor", rank=rank) for rank in ranks]
        self.supervisor.start([spec if self._head is None else self._head.equip(spec), *others])

    def open_tokenizer(self) -> Tokenizer | None:
        """Done while the children load, so it costs the start no time. A model that cannot be served often lacks a
        tokenizer too; the user shall hear of what matters more."""
        try:
            check_model(self.files, self.settings.model)
            return open_tokenizer(self.files, self.settings.model)
        except BoughError as error:
            raise self.supervisor.error or error from None

    def input_reader(self, tokenizer: Tokenizer | None) -> InputReader:
        return input_reader(self.files, self.settings.model, tokenizer)

    def wait_until_ready(self) -> None:
        self.limits = self.supervisor.wait_until_ready(self.settings.process.start_timeout_s)["scheduler"]
        others = [child.ready for child in self.supervisor.children if child.role == "executor" and child.ready]
        if others:
            usage = self.limits["memory_usage"]
            usage["weight_of_ranks"] = [usage["weight"], *(rank["weight"] for rank in others)]

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
        )


def open_socket_folder(cleanup: contextlib.ExitStack) -> Path:
    """A new folder, private to the user: a user who can open the sockets can use the engine. It goes with `cleanup`."""
    sweep_dead_owners()
    folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-")
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def sweep_dead_owners() -> None:
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            match = FOLDER_NAME.fullmatch(entry.name)
            if match and _is_ours(entry) and not _is_alive(int(match[1])):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:  # another engine has just swept it
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
