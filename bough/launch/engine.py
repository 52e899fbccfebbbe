"""The offline API: a model in the caller's hands, without HTTP.

The client lives on an event loop in a thread of its own, so `generate` works in scripts, notebooks, inside running
event loops and from any number of threads. The engine's processes start before the client's modules are loaded.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

from bough.core import control
from bough.core.control import ProfileStart, ReadWeight, SwapWeights, TakeTensors, WeightsCommand
from bough.core.errors import EngineDeadError, RequestError
from bough.core.sampling_params import GRAMMAR_FIELDS, SamplingParams
from bough.core.settings import Settings
from bough.launch.engine_processes import EngineProcesses
from bough.launch.parts import attach_media, input_reader
from bough.messages.outputs import Reply, facts_of
from bough.messages.requests import ChangeAdapters, FlushCache, Pause, PauseMode, Resume, StartProfile, StopProfile
from bough.observability.logs import set_up_logging
from bough.version import __version__

if TYPE_CHECKING:
    from bough.client.inputs import Inputs
    from bough.launch.client_end import Link

T = TypeVar("T")
Output = dict[str, Any]  # text, output_ids, meta_info


class WeightUpdate(NamedTuple):
    """What became of an update of the weights, as SGLang's engine returns it."""

    success: bool
    message: str
    num_paused_requests: int


class Engine:
    """Generates text from one model.

    >>> with bough.Engine() as engine:
    ...     engine.generate("The capital of France is", {"max_new_tokens": 8, "temperature": 0})["text"]
    """

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        """Every setting is a keyword (`bough generate --help` lists them). Without a model the default one is used, and
        fetched if needed."""
        settings.setdefault("log_level", "warning")
        if model is not None:
            settings["model"] = str(model)
        self.settings = Settings.from_flat(settings)
        set_up_logging("engine", self.settings.process.log_level)
        self._closed = False
        self._cleanup = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        # The exit hook must not keep a forgotten engine alive.
        self._at_exit = weakref.finalize(self, _close_beside, self._link, self._cleanup)
        atexit.register(self._at_exit)

    # Generation -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """One prompt or many, as text or token ids. A list comes back as a list; `stream=True` gives an iterator of
        cumulative outputs. Options: return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob,
        return_text_in_logprobs, return_prompt_token_ids, rid, priority, extra_key, cache_salt, routed_dp_rank,
        lora_path (the name of an adapter), custom_logit_processor, session_params (of `open_session`),
        return_hidden_states, return_routed_experts (from routed_experts_start_len on), input_embeds (vectors in the
        place of tokens); image_data, video_data, audio_data (URLs, base64, bytes, Pillow images, arrays, tensors: one,
        a list, or a list for each prompt); and what the answer must match, here or in `sampling_params`: json_schema
        (an object, JSON text or a pydantic model), regex, ebnf, structural_tag or choices."""
        inputs = self._read(prompt, sampling_params, input_ids, in_parts=not stream, **options)
        if stream:
            return self._iterate(inputs)
        return self._wait(self._client.generate(inputs))

    async def async_generate(self, *given: Any, stream: bool = False, **options: Any) -> Any:
        """Like `generate`, for callers with an event loop of their own: await the answer or, with `stream=True`, an
        async iterator."""
        inputs = self._read(*given, **options)
        if stream:
            return self._aiterate(inputs)
        return await asyncio.wrap_future(self._schedule(self._client.generate(inputs)))

    # Vectors ----------------------------------------------------------------------------------------------------------

    def encode(self, prompt: str | list[str] | None = None, **options: Any) -> Any:
        """`embedding` and `meta_info` of one text or many: a vector or, of a classifier, the scores of its labels.
        Options: input_ids in the place of the text, dimensions."""
        return self._wait(self._vectors.encoded(prompt=prompt, **options))

    async def async_encode(self, prompt: str | list[str] | None = None, **options: Any) -> Any:
        return await asyncio.wrap_future(self._schedule(self._vectors.encoded(prompt=prompt, **options)))

    def rerank(self, query: str, documents: list[str], instruct: str | None = None) -> list[float]:
        """How well each document answers the query, from 0 to 1, by a cross-encoder or Qwen3-Reranker."""
        scores: list[float] = self._wait(self._vectors.rerank(query, documents, instruct))[0].tolist()
        return scores

    async def async_rerank(self, *given: Any, **options: Any) -> Any:
        return (await asyncio.wrap_future(self._schedule(self._vectors.rerank(*given, **options))))[0].tolist()

    def score(self, query: Any, items: Any, label_token_ids: list[int], **options: Any) -> list[list[float]]:
        """For each item how likely the model goes on with each label behind the query and the item, which are texts or
        token ids. Options: apply_softmax, item_first, lora_path."""
        scoring = self._vectors.score(query, items, label_token_ids, **options)
        scores: list[list[float]] = self._wait(scoring)[0].tolist()
        return scores

    async def async_score(self, *given: Any, **options: Any) -> Any:
        return (await asyncio.wrap_future(self._schedule(self._vectors.score(*given, **options))))[0].tolist()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Ends a request; whoever waits for it gets what there is, with the finish reason `abort`."""

        async def abort() -> None:
            self._client.abort(rid, abort_all=abort_all)

        self._wait(abort())

    # Control ----------------------------------------------------------------------------------------------------------

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing happens, while requests run or wait."""
        return self._wait(self._client.call(FlushCache)).ok

    def update_weights_from_disk(
        self,
        model_path: str | Path,
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> WeightUpdate:
        """Reads another checkpoint of the same model in the place of its weights, once the requests that run have ended
        (`abort_all_requests` ends them). Where it does not fit, `success` is false and the old weights serve on."""
        options = {"flush_cache": flush_cache, "abort_all_requests": abort_all_requests}
        return self._update(SwapWeights(str(model_path), load_format), weight_version=weight_version, **options)

    def update_weights_from_tensor(
        self, named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any], load_format: None = None, **options: Any
    ) -> WeightUpdate:
        """Gives tensors, by the checkpoint's names, the values of torch's `named_tensors`, through shared memory; the
        others stay. Options and outcome are those of `update_weights_from_disk`."""
        from bough.rl import shared_tensors

        with shared_tensors(named_tensors) as path:
            return self._update(TakeTensors((path,)), **options)

    def update_weights_from_ipc(self, files: Iterable[str | Path], **options: Any) -> WeightUpdate:
        """The same from files of this user (`bough.rl.shared_tensors`): safetensors, or handles of CUDA tensors."""
        return self._update(TakeTensors(tuple(map(str, files))), **options)

    def update_weight_version(self, new_version: str, abort_all_requests: bool = False) -> WeightUpdate:
        """Names the weights that are served."""
        options = {"flush_cache": False, "abort_all_requests": abort_all_requests}
        return self._update(control.SetVersion(), weight_version=new_version, **options)

    def init_weights_update_group(self, *place: Any, **options: Any) -> str:
        """Joins a trainer's group (`bough.rl.TrainerGroup`), by `JoinTrainer`'s fields. Raises a `RequestError` where
        the trainer does not come."""
        return self._order(self._client.change_trainers(control.JoinTrainer(*place, **options))).message

    def update_weights_from_distributed(
        self, names: Any, dtypes: Any, shapes: Any, group_name: str = control.WEIGHTS_GROUP, **options: Any
    ) -> WeightUpdate:
        """Receives what the trainer of a group sends, in this order; else like `update_weights_from_tensor`."""
        sizes = tuple(tuple(shape) for shape in shapes)
        return self._update(control.ReceiveTensors(tuple(names), tuple(map(str, dtypes)), sizes, group_name), **options)

    def destroy_weights_update_group(self, group_name: str = control.WEIGHTS_GROUP) -> str:
        return self._order(self._client.change_trainers(control.LeaveTrainer(group_name))).message

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first rows of a tensor, by the checkpoint's name."""
        return json.loads(self._order(self._client.read_weight(ReadWeight(name, truncate_size))).message)

    def _update(self, command: WeightsCommand, **options: Any) -> WeightUpdate:
        reply = self._wait(self._client.update_weights(command, **options))
        return WeightUpdate(reply.ok, reply.message, reply.data.get("num_paused_requests", 0))

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Gives the memory of `weights`, `kv_cache` or both back, until `resume_memory_occupation`. Raises a
        `RequestError` while requests run; requests in between are refused."""
        self._order(self._client.release_memory(tags))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Takes the memory again. Weights are read from the files that they came from; the cache is empty."""
        self._order(self._client.resume_memory(tags))

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stops computing until `continue_generation`; requests that run are ended, or go on then: `retract` gives up
        their pages, `in_place` keeps them."""
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r}.", field="mode")
        self._order(self._client.call(lambda call: Pause(call, mode)))

    def continue_generation(self) -> None:
        self._order(self._client.call(Resume))

    def load_lora_adapter(self, lora_name: str, lora_path: str | Path, pinned: bool = False) -> None:
        """Loads an adapter that PEFT has saved; requests choose it by its name (`lora_path`). Needs `enable_lora`."""
        self._order(self._client.call(lambda call: ChangeAdapters(call, lora_name, str(lora_path), pinned)))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Raises a `RequestError` while requests use it."""
        self._order(self._client.call(lambda call: ChangeAdapters(call, lora_name)))

    def open_session(
        self,
        capacity_of_str_len: int,
        session_id: str | None = None,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> str:
        """The id of a session, whose requests (`session_params`) bring only what is new of a conversation. It is closed
        when it was not used for `timeout` seconds, an hour when left out. The capacity is SGLang's; there is none."""
        if timeout is not None and not timeout > 0:
            raise RequestError(f"timeout must be more than 0 seconds, got {timeout!r}.", field="timeout")
        if streaming:
            raise RequestError("streaming: requests of a session go on behind finished ones; leave it out.")
        return self._order(self._client.change_session(session_id, timeout_s=timeout)).message

    def close_session(self, session_id: str) -> None:
        """Forgets a session; its requests run on."""
        self._order(self._client.change_session(session_id, open=False))

    def start_profile(self, **options: Any) -> None:
        """Records what the executor's process does until `stop_profile`, by `ProfileStart`'s options."""
        self._order(self._client.call(lambda call: StartProfile(call, command=ProfileStart(**options))))

    def stop_profile(self) -> str:
        """Ends the recording and says which file it is in."""
        return self._order(self._client.call(StopProfile)).message

    def start_expert_distribution_record(self) -> None:
        """Counts how often each expert is chosen, from now on; needs `expert_distribution_recorder_mode="stat"`."""
        self._order(self._client.record_experts("start"))

    def stop_expert_distribution_record(self) -> None:
        self._order(self._client.record_experts("stop"))

    def dump_expert_distribution_record(self) -> dict[str, list[list[int]]]:
        """`logical_count`, the choices of each expert in each layer; layers without experts have zeros."""
        return self._order(self._client.record_experts("dump")).data

    def get_model_info(self) -> dict[str, Any]:
        """What is served."""
        return self._processes.describe().to_dict() | facts_of(self._wait(self._client.states())[0])

    def get_server_info(self) -> dict[str, Any]:
        """Settings, limits and the present load."""
        states = self._wait(self._client.states())
        return {
            **self.settings.to_shown(),
            **self._processes.limits,
            **self._processes.describe().to_dict(),
            **facts_of(states[0]),
            "version": __version__,
            "internal_states": states,
            "dead_replicas": self._client.dead_replicas,
        }

    @property
    def served_model_name(self) -> str:
        return self._processes.served_model_name

    def shutdown(self) -> None:
        """Ends the engine's processes. Requests that still run are aborted. Harmless when called twice."""
        self._closed = True
        self._at_exit()  # which happens once
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # Start ------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._processes = EngineProcesses(self.settings, self._cleanup)
        supervisor = self._processes.supervisor
        # Each cleanup is registered before what it cleans up is begun: a start may fail at any point.
        at_last = self._cleanup.enter_context(contextlib.ExitStack())  # for the link: it tells the processes to leave
        self._cleanup.callback(supervisor.close)
        self._processes.start()
        from bough.launch.client_end import Link

        self._link = link = Link(self._processes.addresses, **self._processes.of_hosts)
        at_last.callback(link.close)
        self._cleanup.callback(link.send_shutdown)
        self._cleanup.callback(supervisor.expect_endings)
        supervisor.on_death, supervisor.on_loss = link.end.die, link.end.lose
        link.open()
        self.tokenizer = self._processes.open_tokenizer()
        self._reader = input_reader(self._processes.files, self.settings.model, self.tokenizer)
        self._processes.wait_until_ready()
        method, tokens = self.settings.parallel.load_balance_method, self._processes.limits["max_total_num_tokens"]
        self._client = self._link.connect(self.tokenizer, method, tokens)
        self._cleanup.callback(attach_media(self._client, self._processes.files, self.settings, self.tokenizer))
        from bough.client.vectors import Vectors

        read = partial(asyncio.to_thread, self._reader.read)
        self._vectors = Vectors(self._client, read, self.tokenizer, self._processes.limits)

    # Between the caller's thread and the client's loop ----------------------------------------------------------------

    def _read(self, prompt: Any = None, sampling_params: Any = None, input_ids: Any = None, **options: Any) -> Inputs:
        if self._closed:
            raise EngineDeadError("This engine was shut down.")
        grammar = {name: value for name in GRAMMAR_FIELDS if (value := options.pop(name, None)) is not None}
        if grammar:
            sampling_params = _with_fields(sampling_params, grammar)
        try:
            given = {"prompt": prompt, "input_ids": input_ids, "sampling_params": sampling_params}
            return replace(self._reader.read(**given, **options), metered=False)  # nobody reads this client's metrics
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise RequestError(f"generate(): {str(error).split('() ')[-1]}.") from None

    def _schedule(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise EngineDeadError("This engine was shut down.")
        return asyncio.run_coroutine_threadsafe(work, self._link.loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._schedule(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: the requests are aborted, not left running
            raise

    def _order(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        reply = self._wait(work)
        if not reply.ok:
            raise RequestError(reply.message)
        return reply

    def _iterate(self, inputs: Inputs) -> Iterator[Output]:
        """The client's stream, fetched piece by piece; leaving the loop early aborts what still runs."""
        outputs = self._client.stream(inputs)
        try:
            while (output := self._wait(_next_of(outputs))) is not None:
                yield output
        finally:
            self._close_stream(outputs)

    async def _aiterate(self, inputs: Inputs) -> AsyncIterator[Output]:
        outputs = self._client.stream(inputs)
        try:
            while (output := await asyncio.wrap_future(self._schedule(_next_of(outputs)))) is not None:
                yield output
        finally:
            self._close_stream(outputs)

    def _close_stream(self, outputs: AsyncGenerator[Output, None]) -> None:
        """Not waited for: an abandoned stream may be closed by the garbage collector, on the link's own thread."""
        if not self._closed:
            self._schedule(_close(outputs))


def _with_fields(sampling_params: Any, fields: dict[str, Any]) -> Any:
    if isinstance(sampling_params, list | tuple):
        return [_with_fields(each, fields) for each in sampling_params]
    if isinstance(sampling_params, SamplingParams):
        sampling_params = {name: getattr(sampling_params, name) for name in SamplingParams.__struct_fields__}
    if not isinstance(sampling_params, Mapping | None):
        return sampling_params  # whoever reads it will say what is wrong with it
    return {**(sampling_params or {}), **fields}


async def _next_of(outputs: AsyncGenerator[Output, None]) -> Output | None:
    return await anext(outputs, None)


async def _close(outputs: AsyncGenerator[Output, None]) -> None:
    await outputs.aclose()


def _close_beside(link: Link, cleanup: contextlib.ExitStack) -> None:
    """Runs the cleanup. It waits for the link's thread, so where the garbage collector found the engine on that very
    thread, another one must do it."""
    if link.runs_here():
        threading.Thread(target=cleanup.close, name="bough-cleanup").start()
    else:
        cleanup.close()
