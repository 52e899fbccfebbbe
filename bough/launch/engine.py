"""The offline API: a model in the caller's hands, without HTTP.

The engine's processes are children of the caller's. Its client lives on an event loop in a thread of its own, so
`generate` works in scripts, notebooks, inside running event loops and from any number of threads, and several engines
live side by side in one process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import shutil
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from bough.client.handle import EngineClient
from bough.client.inputs import InputReader, Inputs
from bough.core.errors import EngineDeadError, RequestError
from bough.core.settings import Settings
from bough.launch.parts import open_tokenizer
from bough.launch.spec import ChildSpec
from bough.launch.supervisor import Supervisor
from bough.loader.config import read_sampling_defaults
from bough.loader.shapes import find_files
from bough.messages.channels import Addresses, Sender, decoder_of
from bough.messages.outputs import ToClient
from bough.messages.requests import Shutdown
from bough.observability.logs import set_up_logging
from bough.tokenizer.tokenizer import Tokenizer
from bough.version import __version__

T = TypeVar("T")
Output = dict[str, Any]  # text, output_ids, meta_info

# Arguments of SGLang's Engine whose feature this engine does not have: accepted when left at None.
UNBUILT_ARGUMENTS = frozenset(
    {
        "image_data",
        "video_data",
        "audio_data",
        "lora_path",
        "custom_logit_processor",
        "return_hidden_states",
        "session_params",
        "input_embeds",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
    }
)


class Engine:
    """Generates text from one model.

    >>> with bough.Engine() as engine:
    ...     engine.generate("The capital of France is", {"max_new_tokens": 8, "temperature": 0})["text"]
    """

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        """Every flag of `bough serve` is a keyword; without a model the default one is used (and fetched if needed)."""
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
        self._at_exit = weakref.finalize(self, self._cleanup.close)
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
        return_text_in_logprobs, rid, priority, extra_key, cache_salt."""
        inputs = self._read(prompt, sampling_params, input_ids, options)
        if stream:
            return self._iterate(inputs)
        return self._wait(self._client.generate(inputs))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """Like `generate`, for callers with an event loop of their own: await the answer or, with `stream=True`, an
        async iterator."""
        inputs = self._read(prompt, sampling_params, input_ids, options)
        if stream:
            return self._aiterate(inputs)
        return await asyncio.wrap_future(self._schedule(self._client.generate(inputs)))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Ends a request; whoever waits for it gets what there is, with the finish reason `abort`."""

        async def abort() -> None:
            self._client.abort(rid, abort_all=abort_all)

        self._wait(abort())

    # Control ----------------------------------------------------------------------------------------------------------

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing happens, while requests run or wait."""
        return self._wait(self._client.flush_cache()).ok

    def get_server_info(self) -> dict[str, Any]:
        """Settings, limits and the present load."""
        reply = self._wait(self._client.state())
        return {
            **self.settings.to_flat(),
            **self._ready["scheduler"],
            "model_path": str(self._files.gguf or self._files.folder),
            "served_model_name": self.served_model_name,
            "version": __version__,
            "internal_states": [reply.data],
        }

    @property
    def served_model_name(self) -> str:
        return self.settings.model.served_model_name or self._files.name

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def shutdown(self) -> None:
        """Ends the engine's processes. Requests that still run are aborted. Harmless when called twice."""
        if self._closed:
            return
        self._closed = True
        self._at_exit()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # Start ------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        model = self.settings.model
        self._files = find_files(model)
        # Private to the user: whoever can open these sockets can use the engine.
        folder = tempfile.mkdtemp(prefix="bough-")
        self._cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        addresses = Addresses.in_folder(Path(folder))
        self._link = _Link(addresses)
        flat = self.settings.to_flat()
        specs = [ChildSpec(role, flat, addresses, self._files) for role in ("scheduler", "detokenizer")]
        supervisor = Supervisor(specs, self._link.die)
        self._cleanup.callback(_end_processes, supervisor, self._link)
        self._tokenizer = open_tokenizer(self._files, model)
        defaults = read_sampling_defaults(self._files) if model.sampling_defaults == "model" else {}
        self._reader = InputReader(self._tokenizer, defaults, model.random_seed)
        self._ready = supervisor.wait_until_ready(self.settings.process.start_timeout_s)
        self._client = self._link.connect(self._tokenizer)

    # Between the caller's thread and the client's loop ----------------------------------------------------------------

    def _read(self, prompt: Any, sampling_params: Any, input_ids: Any, options: dict[str, Any]) -> Inputs:
        if self._closed:
            raise EngineDeadError("This engine was shut down.")
        for name in UNBUILT_ARGUMENTS & options.keys():
            if options.pop(name):
                raise RequestError(f"{name} is not supported by this engine; leave it out.", field=name)
        try:
            return self._reader.read(prompt=prompt, input_ids=input_ids, sampling_params=sampling_params, **options)
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

    def _iterate(self, inputs: Inputs) -> Iterator[Output]:
        """The client's stream, handed over piece by piece; leaving the loop early aborts what still runs."""
        pieces: queue.SimpleQueue[Output | BaseException | None] = queue.SimpleQueue()

        async def feed() -> None:
            try:
                async for output in self._client.stream(inputs):
                    pieces.put(output)
                pieces.put(None)
            except BaseException as error:
                pieces.put(error)
                raise

        future = self._schedule(feed())
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            future.cancel()

    async def _aiterate(self, inputs: Inputs) -> AsyncIterator[Output]:
        outputs = self._client.stream(inputs)

        async def next_output() -> Output | None:
            return await anext(outputs, None)

        async def close() -> None:
            await outputs.aclose()  # type: ignore[attr-defined]

        try:
            while (output := await asyncio.wrap_future(self._schedule(next_output()))) is not None:
                yield output
        finally:
            if not self._closed:
                await asyncio.wrap_future(self._schedule(close()))


class _Link:
    """The client's end of the engine's channels, on an event loop in a thread of its own."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._context = zmq.asyncio.Context()
        self._plain: zmq.Context[Any] = zmq.Context.shadow(self._context)
        self._client: EngineClient | None = None
        self._death: EngineDeadError | None = None
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="bough-client")
        self._thread.start()
        self._run(self._open()).result()

    def connect(self, tokenizer: Tokenizer | None) -> EngineClient:
        return self._run(self._make_client(tokenizer)).result()

    def die(self, error: EngineDeadError) -> None:
        """Called by the supervisor's thread."""

        def tell() -> None:
            self._death = error
            if self._client is not None:
                self._client.die(error)

        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self.loop.call_soon_threadsafe(tell)

    def say_goodbye(self) -> None:
        async def send() -> None:
            for sender in (self._scheduler, self._detokenizer):
                sender.send(Shutdown())
            if self._client is not None:
                self._client.die(EngineDeadError("This engine was shut down."))

        self._run(send()).result()

    def close(self) -> None:
        async def stop() -> None:
            self._receiving.cancel()
            for socket in (self._scheduler, self._detokenizer, self._inbox):
                socket.close()

        self._run(stop()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self._context.term()

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _open(self) -> None:
        self._scheduler = Sender(self._plain, self._addresses.scheduler)
        self._detokenizer = Sender(self._plain, self._addresses.detokenizer)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(self._addresses.client)
        self._receiving = asyncio.create_task(self._receive())

    async def _make_client(self, tokenizer: Tokenizer | None) -> EngineClient:
        self._client = EngineClient(self._scheduler, tokenizer)
        if self._death is not None:
            self._client.die(self._death)
        return self._client

    async def _receive(self) -> None:
        decoder = decoder_of(ToClient)
        while True:
            message = decoder.decode(await self._inbox.recv())
            if self._client is not None:
                self._client.receive(message)


def _end_processes(supervisor: Supervisor, link: _Link) -> None:
    link.say_goodbye()
    supervisor.close()
    link.close()
