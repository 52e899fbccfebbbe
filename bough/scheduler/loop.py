"""The scheduler's loop: it only states the order of events.

With overlap, step t + 1 is planned and launched before the result of step t is read, so the executor always has work
queued. A pipeline has as many steps in flight as stages. Where step t is known to take long, the next is planned
shortly before its end, so that requests that arrive in the meantime are in step t + 1. When there is nothing to do the
loop blocks on the inbox, and audits the page accounts.
"""

import dataclasses
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import assert_never

from bough.constrained.interface import Ticket
from bough.core.control import SwapWeights
from bough.core.errors import BoughError, RequestError
from bough.core.finish import FinishAbort
from bough.core.plan import Executor, HostMemory, InFlight
from bough.core.settings import LIVE_SETTINGS, MemorySettings, SchedulerSettings
from bough.messages import requests as messages
from bough.messages.outputs import WEIGHT_VERSION, Reply
from bough.observability.timeline import Kept, Timeline
from bough.scheduler.adapters import Adapters
from bough.scheduler.assembly import PlannedStep
from bough.scheduler.commit import Committer
from bough.scheduler.control import ControlQueue, Recording, means
from bough.scheduler.grammar_gate import POLL_S, GrammarGate
from bough.scheduler.grammar_steps import GrammarSteps
from bough.scheduler.handover import Handover
from bough.scheduler.host_tier import TieredCache
from bough.scheduler.intake import Intake, opening
from bough.scheduler.jump_forward import JumpForward
from bough.scheduler.media import Media
from bough.scheduler.planner import Planner
from bough.scheduler.ports import CacheEvents, Grammars, Inbox, Outbox, Proposer
from bough.scheduler.prefix_cache import PrefixCache
from bough.scheduler.request import Request
from bough.scheduler.rows import RowTable
from bough.scheduler.running_batch import RunningBatch
from bough.scheduler.sessions import Sessions
from bough.scheduler.stats import Stats
from bough.scheduler.step_time import StepTimeEstimate
from bough.scheduler.waiting_queue import Timeouts, WaitingQueue

log = logging.getLogger(__name__)

SHORTEST_WAIT_S = 0.001  # for late arrivals: the resolution of the inbox's timeout
LONGEST_WAIT_S = 0.002  # between two polls of a running step, which may end before its estimate
# Requests that are looked into in a turn, or as many as fill a step: of a burst, the first are computed before the last
# are looked into.
TAKEN_AT_ONCE = 32
FEW_TOKENS = 32  # that a request is taken to bring at least, so that a turn looks into some hundreds at most
PAUSE_STEPS = 32  # between two pieces of the executor's work under load, in which every stream stands still
QUIET_S = 1.0  # without a message before the page accounts are audited, so that no request waits for the audit


class Scheduler:
    """Owns the requests of one engine, from intake to their terminal message."""

    def __init__(
        self,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        *,
        memory: MemorySettings,
        settings: SchedulerSettings,
        eos_ids: Sequence[int] = (),
        seed: int = 0,
        events: CacheEvents | None = None,
        timeline: Timeline | None = None,
        grammars: Grammars | None = None,
        load_processor: Callable[[str], object] | None = None,
        proposer: Proposer | None = None,
        host: HostMemory | None = None,
        handover: Handover | None = None,
        adapters: Adapters | None = None,
        weight_version: str = WEIGHT_VERSION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = executor.limits()
        self._executor, self._inbox, self._outbox, self._clock = executor, inbox, outbox, clock
        self._settings = settings
        tell = None if events is None else events.add
        if host is None:
            self._cache = PrefixCache(limits, memory, tell)
        else:
            self._cache = TieredCache(limits, memory, tell, executor, host)
        self._table = RowTable(limits.rows, limits.context_length, limits.page_size, limits.groups, limits.draft_levels)
        self._batch = RunningBatch(self._table, self._cache)
        self._queue = WaitingQueue()
        self._arrived: OrderedDict[int, messages.Generate] = OrderedDict()  # and not looked into yet, by handle
        self._more_follow = False
        self._requests: dict[int, Request] = {}
        self._adapters = adapters or Adapters()
        media = Media(limits, memory.mm_cache_size_mb << 20)
        self._intake = Intake(limits, settings, eos_ids, load_processor, self._adapters, media)
        self._gate = GrammarGate(grammars, eos_ids, any_whitespace=settings.grammar_any_whitespace)
        self._jump_forward = None
        if grammars is not None and eos_ids and limits.can_go_back and not settings.disable_jump_forward:
            self._jump_forward = JumpForward(self._batch, grammars, eos_ids, limits.vocab_size)
        self._timeline = timeline or Timeline()
        self._grammar_steps = GrammarSteps(self._batch, executor, self._jump_forward, self._timeline)
        self._planner = Planner(self._batch, self._queue, settings, limits, seed, proposer, self._adapters, media)
        self._control = ControlQueue(executor, weight_version)
        sinks, speculates = (outbox, eos_ids, self._forget, clock, self._control.facts), self._planner.drafting.most > 1
        self._committer = Committer(self._batch, self._grammar_steps, *sinks, speculates=speculates)
        self._handover = Handover() if handover is None else handover
        self._handover.attach(self._batch, self._queue, self._control.facts, self._committer.drop)
        self._sessions = Sessions(self._cache, clock, self._end)
        self._step_tokens = limits.chunk_tokens
        self._step_time = StepTimeEstimate(limits.late_plans)
        self._timeouts = Timeouts(settings.waiting_timeout_s, settings.running_timeout_s)
        self._stats = Stats(settings.decode_log_interval, clock)
        self._events = events
        self._recording = Recording(executor)
        self._in_flight: deque[tuple[PlannedStep, InFlight]] = deque()
        self._depth = limits.stages - settings.disable_overlap_schedule  # steps in flight while the next is planned
        self._closing = False
        self._paused = False
        self._warming_up = True  # the executor may have put work off to quiet moments
        self._dirty = False  # something ran since the last audit

    def run(self) -> None:
        while not self._closing:
            self.turn()
        self._abort(messages.Abort(message="The engine was shut down."), 503)
        self._commit_all()
        self._recording.close()

    def turn(self) -> None:
        with self._timeline.phase("messages"):
            self._take_in(self._messages())
            self._advance_control()
            self._advance_adapters()
            self._expire()
            self._open_gate()
        self._await_late_arrivals()
        self._launch_next()
        while len(self._in_flight) > self._depth:
            self._commit_oldest()
        if self._events is not None:
            self._events.flush()

    # The order of events ----------------------------------------------------------------------------------------------

    def _messages(self) -> list[messages.ToScheduler]:
        """Everything that has arrived: at once while there is work; when there is none, as soon as something comes."""
        if self._arrived:
            return self._inbox.receive(0.0)
        if self._control.running:
            return self._inbox.receive(POLL_S)
        if self._paused and self._requests:
            return self._inbox.receive(QUIET_S)  # and no longer: their time may run out meanwhile
        if self._in_flight or len(self._requests) > self._held or self._control.message is not None:
            return self._inbox.receive(0.0)
        # Requests that wait for neither wait for another engine, whose message wakes.
        soon = len(self._gate) or self._handover.busy or self._adapters.loading
        if self._requests or soon:
            return self._inbox.receive(POLL_S if soon else QUIET_S)
        with self._timeline.phase("idle"):
            return self._rest()

    def _rest(self) -> list[messages.ToScheduler]:
        """Nothing runs and nothing waits: does what was put off, then sleeps until something comes. The next load will
        be like any first one."""
        self._batch.take_edits()
        self._cache.copy_out(resting=True)
        if self._cache.behind:
            return self._inbox.receive(POLL_S)
        self._planner.ratio.reset()
        self._stats.idle()
        self._warming_up = self._executor.idle()
        if self._warming_up:
            return self._inbox.receive(0.0)
        if self._dirty:
            messages = self._inbox.receive(QUIET_S)
            if messages:
                return messages
            self._audit()
        return self._inbox.receive(self._sessions.next_look_s)

    def _await_late_arrivals(self) -> None:
        """While the executor is busy for some time yet and the next step has room, it need not be planned."""
        while self._in_flight and not self._closing:
            (step, in_flight), now = self._in_flight[0], self._clock()
            left_s = self._step_time.plan_by(step) - now
            # Of a burst that is still coming much may be cached: the first of it are computed now.
            least = FEW_TOKENS if self._more_follow else None
            if left_s < SHORTEST_WAIT_S or in_flight.ready() or not self._planner.fits_late_arrivals(now, least):
                return
            with self._timeline.phase("late arrivals"):
                self._take_in(self._inbox.receive(0.0 if self._arrived else min(left_s, LONGEST_WAIT_S)))
                self._open_gate()

    def _launch_next(self) -> None:
        if self._paused or self._control.running:
            return
        held, begun_at = self._grammar_steps.release(), self._clock()
        with self._timeline.phase("plan"):
            planned = self._planner.plan(self._clock(), drained=not self._in_flight)
        planned_at = self._clock()
        if planned is None:
            self._cache.copy_out(resting=False)
            # Nothing can be launched before what is in flight has been committed.
            if self._in_flight:
                self._commit_oldest()
            elif held:
                time.sleep(POLL_S)
            elif len(self._requests) > self._held:
                # Nothing would ever change: a defect. Better a process that ends and says so than one that spins.
                raise RuntimeError(
                    f"The scheduler has {len(self._requests)} requests ({len(self._queue)} of them waiting) and cannot "
                    f"go on with any of them; {self._cache.available} of {self._cache.pool.total} pages are available. "
                    "This is a defect in Bough, please report it."
                )
            return
        with self._timeline.phase("launch", planned.plan.step):
            self._in_flight.append((planned, self._executor.launch(planned.plan)))
            launched_at = self._clock()
            self._step_time.launched(planned, begun_at, launched_at)
        self._timeline.launched((begun_at, planned_at, launched_at))
        self._handover.launched(planned)
        self._cache.copy_out(resting=False)
        self._dirty = True
        self._grammar_steps.supply(self._in_flight)

    def _commit_oldest(self) -> None:
        (step, in_flight), waited_from = self._in_flight.popleft(), self._clock()
        with self._timeline.phase("wait", step.plan.step):
            result, resulted_at = in_flight.wait(), self._clock()
        with self._timeline.phase("commit", step.plan.step):
            self._planner.after_step(step, result)
            self._committer.commit(step, result)
            self._step_time.ran(step, result.device_span)
            waiting, span = len(self._queue) + len(self._gate), result.device_span
            self._stats.after_step(step.category, span, self._committer, self._cache, self._table, waiting)
        times, work = (waited_from, resulted_at, self._clock()), (step.decodes, step.prompt_tokens)
        self._timeline.committed(step.plan.step, times, span, work)
        self._grammar_steps.supply(self._in_flight)
        self._recording.after_step()
        if step.plan.step % PAUSE_STEPS == 0 and not self._control.running:
            self._executor.idle(busy=True)  # here the step's tokens have been sent, and a launch takes no longer

    def _commit_all(self) -> None:
        while self._in_flight:
            self._commit_oldest()

    def _audit(self) -> None:
        """Checks the books of all pages; takes a tenth of a second when they are many."""
        self._batch.repair()
        self._dirty = False

    def _expire(self) -> None:
        self._sessions.expire()
        waiting = itertools.chain(self._queue, self._gate, self._handover)
        for request, reason in self._timeouts.due(self._clock(), waiting, self._table):
            self._end(request, reason)

    def _open_gate(self) -> None:
        """Requests that another engine was waited for, and those whose grammars have been compiled, go on; those that
        were refused end."""
        for request, ticket, failure in self._handover.passed():
            if self._requests.get(request.handle) is not request:
                continue  # it has just ended by itself
            if failure is not None:
                self._end(request, failure)
            else:
                self._queue_up(request, ticket)
        for request, reason in self._gate.passed():
            request.enter("queued", self._clock())
            if reason is not None:
                self._committer.end(request, reason)
                continue
            if self._jump_forward is not None:
                self._jump_forward.begin(request)
            self._queue.add(request)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _take_in(self, arrived: Sequence[messages.ToScheduler]) -> None:
        """Looks into some of the requests that have arrived. What changes the engine does not overtake them; all else
        does, so that nobody waits for the rest of a large batch to hear whether the engine lives."""
        for message in arrived:
            if isinstance(message, messages.Generate):
                self._arrived[message.handle], self._more_follow = message, message.followed
                continue
            if isinstance(message, messages.Change):
                self._look_into(len(self._arrived))
            self._handle(message)
        # A later one may be more urgent than those before it, or one too many, whose client is to hear that now.
        at_once = self._settings.enable_priority_scheduling or self._settings.max_queued_requests is not None
        self._look_into(len(self._arrived) if at_once else TAKEN_AT_ONCE)

    def _look_into(self, count: int) -> None:
        """Until so many are taken, and as many as fill a step. Of what is cached they bring little, and while a step
        runs there is time for more of them: prompts in small steps end one after the other, in batches of few rows."""
        most, tokens = len(self._requests) + count, 0
        while self._arrived and (len(self._requests) < most or tokens < self._step_tokens):
            _, message = self._arrived.popitem(last=False)
            self._handle(message)
            request, count = self._requests.get(message.handle), len(message.input_ids) // 4
            busy = tokens < self._step_tokens and self._in_flight and not self._in_flight[-1][1].ready()
            if request is not None and busy and count > FEW_TOKENS:
                known = self._cache.tree.match_length(request.tokens[: request.match_cap], request.namespace)
                # Others of this very burst may have the prefix, too.
                count = max(FEW_TOKENS, min(count - known, count // 8))
            tokens += count

    def _handle(self, message: messages.ToScheduler) -> None:
        if self._control.hold(message):
            return
        match message:
            case messages.Generate():
                self._take(message)
            case messages.Abort():
                self._abort(message)
            case messages.StreamEnded():
                if (ended := self._requests.get(message.handle)) is not None:  # else it has just ended by itself
                    self._dequeue(ended)
                    self._committer.drop(ended)
                self._sessions.cut(message)
            case messages.FlushCache():
                self._outbox.reply(self._flush(message))
            case messages.ChangeStorage():
                if (answer := self._handover.change_storage(message)) is not None:  # else once it is done
                    self._outbox.reply(Reply(message.call, *answer))
            case messages.GetState():
                self._outbox.reply(Reply(message.call, True, data=self._state()))
            case messages.GetTree():
                readers = ((each.handle, each.node) for each in self._requests.values() if each.node is not None)
                shown = self._cache.show(message.limit, message.node, readers)
                self._outbox.reply(Reply(message.call, True, data=shown))
            case messages.GetTimeline():
                shown = self._timeline.show(self._records(), message.since, self._clock(), message.name)
                self._outbox.reply(Reply(message.call, True, data=shown))
            case messages.Ping():
                self._outbox.tokens(message)
            case messages.ProcessCommand():
                message.obey()
                self._outbox.tokens(message)
            case messages.ChangeSettings():
                self._outbox.reply(self._change_settings(message))
            case messages.Pause():
                self._outbox.reply(self._pause(message))
            case messages.Resume():
                self._outbox.reply(self._resume(message))
            case messages.StartProfile() | messages.StopProfile():
                self._outbox.reply(self._recording.obey(message))
            case messages.ChangeAdapters():
                reply = self._adapters.obey(message, self._requests.values())
                if reply is not None:  # else once it is read
                    self._outbox.reply(reply)
            case messages.ChangeSession():
                self._outbox.reply(self._sessions.obey(message))
            case messages.Control():
                self._control.message = message
                if message.abort_all:
                    self._abort(messages.Abort(message="All requests were aborted for a command."))
            case messages.Shutdown():
                self._closing = True
            case messages.Garbled():
                self._answer_garbled(message)
            case _:
                assert_never(message)

    def _records(self) -> Iterator[Kept]:
        for request in self._requests.values():
            known = len(request.tokens) if request.row < 0 else int(self._table.known[request.row])
            yield request.names, request.record(known - request.prompt_len, self._clock(), ended=False)

    def _take(self, message: messages.Generate) -> None:
        try:
            self._control.check()
            if self._adapters.hold(message):
                return
            message = self._sessions.joined(message)
            self._handover.check(message)
            request = self._intake.request(message, len(self._queue) + self._held, self._clock())
            ticket = self._gate.ticket(message.sampling)
        except RequestError as error:
            self._committer.refuse(message.handle, FinishAbort.because(error))
            return
        opened = opening(request)
        self._outbox.tokens(opened)
        if opened.ended is not None:  # it was resumed and had nothing more to generate
            return
        self._requests[request.handle] = request
        self._sessions.begin(message, request)
        if self._handover.enter(request, message, ticket):
            request.enter("fetch", self._clock())
        else:
            self._queue_up(request, ticket)

    def _queue_up(self, request: Request, ticket: Ticket | None) -> None:
        request.enter("queued" if ticket is None else "grammar", self._clock())
        if ticket is not None:
            self._gate[request] = ticket
            return
        self._gate.pass_by(request)
        self._queue.add(request)

    def _answer_garbled(self, message: messages.Garbled) -> None:
        log.error("a message to the scheduler cannot be read (handle %s): %s", message.handle, message.error)
        if message.handle is not None and message.handle not in self._requests:
            reason = f"The request cannot be read: {message.error}."
            self._committer.refuse(message.handle, FinishAbort(reason))  # or it is a call:
            self._outbox.reply(Reply(message.handle, False, reason))

    def _abort(self, message: messages.Abort, status_code: int = 499) -> None:
        """Ends the requests that it means, less those that have just ended by themselves."""
        if message.made_at:
            self._intake.aborts.append(message)
        reason = FinishAbort(message.message, status_code, "AbortError")
        if message.handle is not None:
            meant = [self._requests[message.handle]] if message.handle in self._requests else []
        else:
            meant = [r for r in self._requests.values() if message.name is None or message.name in r.names]
        for request in meant:
            self._end(request, reason)
        arrived = list(self._arrived.values()) if message.handle is None else [self._arrived.get(message.handle)]
        dropped = [self._arrived.pop(each.handle) for each in arrived if each is not None and means(message, each)]
        for held in (*dropped, *self._control.drop(message), *self._adapters.drop(message)):
            self._committer.refuse(held.handle, reason)

    def _advance_adapters(self) -> None:
        """Adapters that were read are loaded, and what waited for them goes on."""
        for message, error in self._adapters.finished(self._requests.values()):
            if isinstance(message, Reply):
                self._outbox.reply(message)
            elif error is not None:
                self._committer.refuse(message.handle, FinishAbort.because(error))
            else:
                self._handle(message)

    def _end(self, request: Request, reason: FinishAbort) -> None:
        self._dequeue(request)
        self._committer.end(request, reason)

    def _dequeue(self, request: Request) -> None:
        if request in self._gate:
            self._gate.leave(request)
        elif request in self._handover:
            self._handover.leave(request)
        elif request.row < 0:
            self._queue.remove(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.handle]
        self._timeline.ended(request.names, request.record(request.generated, self._clock(), ended=True))
        self._sessions.ended(request)
        self._planner.drafting.learn(request)

    def _pause(self, message: messages.Pause) -> Reply:
        if message.mode == "abort":
            for request in list(self._requests.values()):
                self._end(request, FinishAbort("Generation was paused (/pause_generation).", 499, "AbortError"))
        self._commit_all()
        if message.mode == "retract":
            self._planner.retraction.clear(self._clock())
        self._paused = True
        return Reply(message.call, True, f"Generation is paused ({message.mode}).")

    def _resume(self, message: messages.Resume) -> Reply:
        try:
            self._control.check()
        except RequestError as error:
            return Reply(message.call, False, error.message)
        self._paused = False
        return Reply(message.call, True, "Generation goes on.")

    def _advance_control(self) -> None:
        """Begins the command that waits once the requests before it have ended, or are paused; answers it when it is
        done, and then takes in what arrived behind it."""
        control = self._control
        while (message := control.message) is not None:
            if not control.running and message.wait and self._requests and not self._paused:
                return
            ok, data = False, {"num_paused_requests": len(self._requests)}
            try:
                if not control.running:
                    self._commit_all()
                    control.start(self._busy)
                if (done := control.finish()) is None:
                    return
                ok, text = True, done.message
                if isinstance(message.command, SwapWeights):
                    self._handover.weights_changed()
                if message.flush_cache:
                    self._cache.flush()
            except BoughError as error:
                text = str(error)
            self._outbox.reply(Reply(message.call, ok, text, data))
            for held in control.close():
                self._handle(held)

    @property
    def _held(self) -> int:
        """Requests that wait for something else than their turn."""
        return len(self._gate) + len(self._handover)

    @property
    def _busy(self) -> int:
        """Requests that hold pages or could take some at any moment: while the engine is paused, only running ones."""
        return self._table.running if self._paused else len(self._requests)

    def _flush(self, message: messages.FlushCache) -> Reply:
        if self._busy:
            text = f"The cache can only be flushed when nothing runs or waits; {self._busy} requests do."
            return Reply(message.call, False, text)
        self._commit_all()
        self._cache.flush()
        return Reply(message.call, True, "Cache flushed.")

    def _change_settings(self, message: messages.ChangeSettings) -> Reply:
        settings = self._settings = dataclasses.replace(self._settings, **message.values)
        self._intake.max_queued = settings.max_queued_requests
        self._timeouts = Timeouts(settings.waiting_timeout_s, settings.running_timeout_s)
        self._stats.set_interval(settings.decode_log_interval)
        return Reply(message.call, True)

    def _state(self) -> dict[str, object]:
        adapted = sum(len(loading.requests) for loading in self._adapters.loading.values())
        return {
            "live_settings": (live := {name: getattr(self._settings, name) for name in LIVE_SETTINGS}),
            **live,  # where SGLang's clients look
            "warming_up": self._warming_up,
            "paused": self._paused,
            "num_running_reqs": self._table.running,
            "num_waiting_reqs": len(self._queue) + len(self._arrived) + self._held + len(self._control) + adapted,
            "num_grammar_queue_reqs": len(self._gate),
            "num_open_sessions": len(self._sessions),
            "num_retracted_reqs": sum(1 for request in self._queue if request.retractions),
            **self._cache.figures,
            **self._committer.figures,
            **self._planner.figures,
            **self._stats.figures,
            **self._handover.counts,
            **self._adapters.facts,
            **self._control.facts,
        }
