"""One engine in parts that are the same whoever uses it: its model's files, its sockets, its processes.

Made and started in steps, so that each user can do other things in between: the offline engine in its caller's thread,
the server beside its event loop.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from bough.core.custom_code import load_dill
from bough.core.errors import BoughError, SettingsError
from bough.core.settings import Settings
from bough.launch.disaggregation import check_disaggregation
from bough.launch.head import Head
from bough.launch.nodes import check_nodes
from bough.launch.parts import check_adapters, check_media, check_model, check_ranks, open_tokenizer
from bough.launch.socket_folders import open_socket_folder
from bough.launch.spec import MODEL_EXECUTOR, ChildSpec, replica_specs
from bough.launch.supervisor import Supervisor
from bough.loader.locate import find_files
from bough.messages.channels import Addresses
from bough.server.model_info import ModelInfo
from bough.tokenizer.chat_template import given_template, template_defaults

if TYPE_CHECKING:
    from bough.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


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
            text = "--kv-events-config tells of the cache of one scheduler; leave it out with --dp-size"
            raise SettingsError(f"{text}, or run that many servers behind `bough gateway`.")
        if parallel.groups > 1 and (parallel.tp_size % parallel.groups or parallel.pp_size > 1):
            text = f"--enable-dp-attention runs attention in --dp-size {parallel.groups} groups of ranks"
            how = f"use a number that divides --tp-size {parallel.tp_size}, and leave out --pp-size"
            raise SettingsError(f"{text}; {how}: groups run each step together.")
        memory = settings.memory
        if memory.enable_hierarchical_cache and memory.disable_radix_cache:
            raise SettingsError("--enable-hierarchical-cache keeps shared prefixes; leave out --disable-radix-cache.")
        if memory.hicache_storage_backend and not (parallel.pp_size == 1 and memory.enable_hierarchical_cache):
            text = "--hicache-storage-backend needs --enable-hierarchical-cache, and all layers of a page in one stage"
            raise SettingsError(f"{text}; leave out --pp-size.")
        check_nodes(parallel)
        check_disaggregation(settings)
        check_adapters(settings)
        check_media(settings.media)
        if parallel.enable_dp_attention and parallel.dp_size == 1:  # SGLang takes it so, too
            log.warning("--enable-dp-attention has no effect: one group of ranks (--dp-size 1) is the ordinary case.")
        if (draft := settings.speculative).speculative_num_steps and draft.speculative_algorithm == "NGRAM":
            log.warning("--speculative-num-steps has no effect with NGRAM; --speculative-num-draft-tokens does it.")
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
            self._head.watch(self.supervisor)
            place, several = self._head.place, parallel.groups > 1
            self.addresses = self._head.place_groups(folder, clients) if several else [place(*self.addresses)]
        self.replica_limits: list[dict[str, Any]] = [{}]  # what each scheduler announced when it was ready

    def start(self) -> None:
        self.supervisor.start([spec for number in self._here for spec in self._specs(number)])

    @property
    def of_hosts(self) -> dict[str, Any]:
        """What clients need beside addresses where other hosts come to them."""
        return {} if self._head is None else {"listeners": self._head.listeners, "cluster_key": self._head.key}

    @property
    def _here(self) -> range:
        """The replicas of this host, which are the first ones."""
        return range(-(-len(self.addresses) // self.settings.parallel.nnodes))

    def _specs(self, number: int) -> list[ChildSpec]:
        """The processes of one replica."""
        key = "" if self._head is None else self._head.key
        specs = replica_specs(self.settings, self.addresses, number, self.files, self._executor, key)
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
        self.replica_limits = [ready[self._specs(number)[0].title] for number in self._here]
        if len(self.addresses) > len(self._here) and self._head is not None:
            self.replica_limits += self._head.announced()

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
