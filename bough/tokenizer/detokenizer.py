"""Tokens in, text out: the only process that sends a request's terminal message.

Stop strings are found here: the output is cut at the match, and the scheduler is told to stop; later tokens find no
stream. One step's tokens make at most one message. A resumed request brings tokens that were delivered before; they go
through the same decoder and the same search for stops, and their text goes out as a replay.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishReason, FinishStop
from bough.messages.channels import ClientSenders, Sender, client_of
from bough.messages.outputs import (
    Delta,
    Deltas,
    DraftCounts,
    Ended,
    HiddenStates,
    LogprobRun,
    Open,
    Reply,
    Started,
    StepOutput,
    ToDetokenizer,
)
from bough.messages.requests import Ping, ProcessCommand, Shutdown, StreamEnded
from bough.tokenizer.incremental import IncrementalDecoder, WindowDecoder
from bough.tokenizer.stops import StopMatcher
from bough.tokenizer.tokenizer import Tokenizer


class ChannelOutlet:
    """Where deltas, replies and stop notices go."""

    def __init__(self, clients: ClientSenders, scheduler: Sender) -> None:
        self._clients, self.reply, self.stream_ended = clients, clients.reply, scheduler.send

    def deltas(self, message: Deltas) -> None:
        """Each client gets its deltas of the step in one message."""
        if len(self._clients) == 1:
            self._clients[0].send(message)
            return
        shares: dict[int, Deltas] = {}
        for delta in message.items:
            shares.setdefault(client_of(delta.handle), Deltas([], [])).items.append(delta)
        for replay in message.replays:
            shares.setdefault(client_of(replay.handle), Deltas([], [])).replays.append(replay)
        for client, share in shares.items():
            self._clients[client].send(share)

    def tell_clients(self, message: ProcessCommand) -> None:
        for client in self._clients:
            client.send(message)


@dataclass(slots=True)
class Stream:
    """One open request: how its text is made, and what has not been sent yet."""

    decoder: IncrementalDecoder | WindowDecoder | None  # None: token ids only
    stops: StopMatcher | None
    keep_stop_token: bool
    interval: int  # tokens between two deltas; 0: one delta at the end
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobRun] = field(default_factory=list)
    started: Started | None = None
    retractions: int = 0
    weight_version: str = ""
    drafts: DraftCounts | None = None
    vector: bytes = b""
    sent: bool = False
    count: int = 0  # of all ids
    states: list[HiddenStates] = field(default_factory=list)

    def due(self) -> bool:
        """The first token goes out at once, whatever the interval: it is what people wait for."""
        return self.interval > 0 and bool(self.ids) and (not self.sent or len(self.ids) >= self.interval)

    def take(self, handle: int, finish: FinishReason | None = None) -> Delta:
        delta = Delta(
            handle,
            "".join(self.text),
            array("i", self.ids).tobytes(),
            self.started,
            self.logprobs,
            finish,
            self.retractions,
            self.drafts,
            self.vector,
            self.states,
            self.weight_version,
        )
        self.text, self.ids, self.logprobs, self.states, self.started, self.sent = [], [], [], [], None, True
        return delta


class Detokenizer:
    def __init__(self, tokenizer: Tokenizer | None, outlet: ChannelOutlet, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self._outlet = outlet
        self._interval = stream_interval
        self._streams: dict[int, Stream] = {}

    def handle(self, message: ToDetokenizer) -> bool:
        match message:
            case Open():
                self._streams[message.handle] = stream = self._open(message)
                if message.output_ids:
                    self._resume(message, stream)
            case StepOutput():
                self._step(message)
            case Ping():
                self._outlet.reply(Reply(message.call, True))
            case ProcessCommand():
                message.obey()
                self._outlet.tell_clients(message)
                self._outlet.reply(Reply(message.call, True))
            case Shutdown():
                return False
            case _:
                assert_never(message)
        return True

    def _open(self, message: Open) -> Stream:
        sampling = message.sampling
        decoder = None
        if self._tokenizer is not None:
            tail = np.frombuffer(message.prompt_tail, dtype=np.int32).tolist()
            decoder = self._tokenizer.decoder(tail, sampling.skip_special_tokens)
        stops = None
        if sampling.stop or sampling.stop_regex:
            stops = StopMatcher(sampling.stop, sampling.stop_regex, sampling.no_stop_trim)
        interval = (sampling.stream_interval or self._interval) if message.stream else 0
        return Stream(decoder, stops, sampling.no_stop_trim, interval)

    def _resume(self, message: Open, stream: Stream) -> None:
        """Takes in what the request had generated before. If that has ended it, all of its text was delivered with it,
        even what is held back until the end; only the end itself is still to be sent."""
        stopped = _push(stream, np.frombuffer(message.output_ids, dtype=np.int32).tolist(), message.ended)
        if stopped is None and message.ended is not None:
            stopped = _flush(stream, message.ended)
        replay = stream.take(message.handle)
        stream.sent = False  # the first token that follows is waited for like any first one
        if stopped is not None and message.ended is None:
            self._outlet.stream_ended(StreamEnded(message.handle, stream.count))
        ends = [] if stopped is None else [self._close(message.handle, stream, stopped, None)]
        self._outlet.deltas(Deltas(ends, [replay]))

    def _step(self, message: StepOutput) -> None:
        deltas: list[Delta] = []
        for started in message.started:
            if (stream := self._streams.get(started.handle)) is not None:
                stream.started = started
        for handle, again in message.retractions.items():
            if (stream := self._streams.get(handle)) is not None:
                stream.retractions, stream.weight_version = again
        for handle, drafts in message.drafts.items():
            if (stream := self._streams.get(handle)) is not None:
                stream.drafts = drafts
        for handle, states in message.states.items():
            if (stream := self._streams.get(handle)) is not None:
                stream.states.append(states)
        ended = {end.handle: end for end in message.ended}
        handles = np.frombuffer(message.handles, dtype=np.int64).tolist()
        tokens = np.frombuffer(message.tokens, dtype=np.int32).tolist()
        ends = np.frombuffer(message.counts, dtype=np.int32).cumsum().tolist() or range(1, len(handles) + 1)
        begin = 0
        for handle, until in zip(handles, ends, strict=True):
            first, begin = begin, until
            stream = self._streams.get(handle)
            if stream is None:  # it ended at a stop string, and the scheduler has not processed that yet
                continue
            if message.logprobs and handle in message.logprobs:
                stream.logprobs.append(message.logprobs[handle])
            end = ended.get(handle)
            stopped = _push(stream, tokens[first:until], None if end is None else end.reason)
            if stopped is not None:
                ended.pop(handle, None)
                if end is None:
                    self._outlet.stream_ended(StreamEnded(handle, stream.count))
                deltas.append(self._close(handle, stream, stopped, end))
            elif stream.due() and handle not in ended:
                deltas.append(stream.take(handle))
        for end in ended.values():
            if (stream := self._streams.get(end.handle)) is not None:
                deltas.append(self._close(end.handle, stream, _flush(stream, end.reason), end))
        if deltas:
            self._outlet.deltas(Deltas(deltas))

    def _close(self, handle: int, stream: Stream, reason: FinishReason, end: Ended | None) -> Delta:
        del self._streams[handle]
        if end is not None:
            stream.retractions, stream.drafts, stream.vector = end.retractions, end.drafts, end.vector
        return stream.take(handle, reason)


def _push(stream: Stream, tokens: Sequence[int], end: FinishReason | None) -> FinishReason | None:
    """Adds tokens, up to the one whose text completes a stop string or cannot be searched; the reason, if there is one.
    Where the request ends with them, only the last may be its stop token."""
    for number, token in enumerate(tokens, 1):
        stream.ids.append(token)
        stream.count += 1
        hidden = number == len(tokens) and isinstance(end, FinishStop) and not stream.keep_stop_token
        if stream.decoder is not None and not hidden:
            stopped = _add_text(stream, stream.decoder.push((token,)))
            if stopped is not None:
                return stopped
    return None


def _add_text(stream: Stream, text: str) -> FinishReason | None:
    """Passes on what no stop can claim; a reason when a stop is complete or cannot be searched for."""
    if stream.stops is None:
        stream.text.append(text)
        return None
    try:
        outcome = stream.stops.push(text)
    except RequestError as error:
        return FinishAbort.because(error)
    stream.text.append(outcome.emit)
    return None if outcome.matched is None else FinishStop(outcome.matched, outcome.matched_text)


def _flush(stream: Stream, reason: FinishReason) -> FinishReason:
    """The request has ended: what was held back as half a character or a possible stop goes out. That half character
    may itself complete a stop, which then is the reason; an abort stays one."""
    stopped = _add_text(stream, stream.decoder.flush()) if stream.decoder is not None else None
    if stopped is None and stream.stops is not None:
        stream.text.append(stream.stops.flush())
    return reason if stopped is None or isinstance(reason, FinishAbort) else stopped
