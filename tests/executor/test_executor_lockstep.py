"""Attention groups in lock step: whatever each has to do, and when, all run as many steps, and tokens are those of one
rank. The groups are threads here, each with a scheduler of its own."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.core.control import Command, CommandResult, Decline, MeetGroups, Sleep, SwapWeights, Wake
from bough.core.errors import RankLostError, RequestError, SettingsError
from bough.core.plan import BatchPlan
from bough.core.settings import MemorySettings, SchedulerSettings, Settings
from bough.distributed.group import RankGroup
from bough.executor.build import build_executor
from bough.executor.control import ModelControl
from bough.executor.load_model import check_split, resolve_config
from bough.executor.lockstep import LOOKS, LockstepExecutor, LockstepInbox
from bough.executor.plain_plans import decode_plan
from bough.executor.ranks import LOOK_IN_S, LeadingExecutor, follow
from bough.loader.locate import locate
from bough.messages.requests import Abort, Control, JoinStep, Pause, Resume, Shutdown, ToScheduler
from bough.scheduler.loop import Scheduler
from tests.executor.test_executor_ranks import FLAGS, PLACES, Orders, alone
from tests.fakes.boxes import FakeOutbox, generate
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.executor import FakeExecutor
from tests.fakes.grammars import EOS, PIECES, FakeGrammars, grammar
from tests.fakes.ranks import MODELS, VOCAB, ThreadAttentionGroup, attention_groups
from tests.fakes.scheduler_bench import Bench

# What one group counts and tells --------------------------------------------------------------------------------------


class Pending:
    """A step, or a command, that a test ends."""

    def __init__(self) -> None:
        self.done, self.error = False, None

    def ready(self) -> bool:
        return self.done

    def wait(self) -> Any:
        assert self.done
        if self.error is not None:
            raise self.error


class Recorded:
    """An executor that does nothing with what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[BatchPlan, Pending]] = []
        self.commands: list[tuple[Command, Pending]] = []

    def limits(self) -> Any:
        return FakeExecutor().limits()

    def launch(self, plan: BatchPlan) -> Pending:
        self.steps.append((plan, Pending()))
        return self.steps[-1][1]

    def control(self, command: Command) -> Pending:
        self.commands.append((command, Pending()))
        return self.commands[-1][1]

    @property
    def kinds(self) -> str:
        return "".join("s" if len(plan.rows) else "." for plan, _ in self.steps)


class Group:
    """One group, with a clockwork in the place of the others."""

    def __init__(self) -> None:
        self.own, self.told, self.box, self.ranks = Recorded(), list[int](), list[Any](), RankGroup()
        self.waits: list[float | None] = []
        self.executor = LockstepExecutor(self.own, self.ranks, lambda message: self.told.append(message.number))  # type: ignore[arg-type]
        self.inbox = LockstepInbox(self._receive, self.executor)

    def _receive(self, timeout_s: float | None) -> list[Any]:
        self.waits.append(timeout_s)
        messages, self.box = self.box, []
        return messages


def test_a_group_tells_of_its_steps_and_joins_those_of_others_when_it_rests() -> None:
    group = Group()
    group.executor.launch(decode_plan(0, 1))
    assert group.told == [1]
    group.own.steps[0][1].done = True
    group.box = [Abort(), JoinStep(3), JoinStep(2)]
    assert group.inbox.receive(None) == [Abort()]
    for _ in range(LOOKS - 2):
        assert group.inbox.receive(None) == []
        assert group.waits[-1] == 0.0 and group.own.kinds == "s"  # it may be about to plan
    group.inbox.receive(None)
    assert group.own.kinds == "s.." and group.told == [1]  # who began the step has told all
    assert group.waits[-1] == LOOK_IN_S  # and not for ever: the empty steps may fail
    for _, step in group.own.steps:
        step.done = True
    group.inbox.receive(None)
    assert group.waits[-1] is None
    group.executor.launch(decode_plan(1, 1))
    assert group.told == [1, 4]


def test_a_group_that_runs_requests_goes_on_with_them() -> None:
    group = Group()
    group.executor.launch(decode_plan(0, 1))
    group.box = [JoinStep(2)]
    for _ in range(5):  # its step runs, so it cannot be what the others wait for
        group.inbox.receive(0.002)
    assert group.own.kinds == "s" and group.waits[-1] == 0.002
    group.own.steps[0][1].done = True
    group.executor.launch(decode_plan(1, 1))
    group.inbox.receive(0.0)
    assert group.own.kinds == "ss"


def test_an_empty_step_that_fails_is_noticed() -> None:
    group = Group()
    group.box = [JoinStep(1)]
    for _ in range(LOOKS + 1):
        group.inbox.receive(None)
    step = group.own.steps[0][1]
    step.done, step.error = True, RankLostError("the other group is gone")  # type: ignore[assignment]
    with pytest.raises(RankLostError, match="the other group is gone"):
        group.inbox.receive(None)


def test_nothing_is_joined_while_a_command_waits_for_the_others_and_counts_go_on_behind_it() -> None:
    group = Group()
    group.executor.control(Sleep())
    group.box = [JoinStep(4)]
    for _ in range(LOOKS + 1):
        group.inbox.receive(0.01)
    assert group.own.kinds == ""
    group.own.commands[0][1].done, group.ranks.turns_taken = True, 5  # four steps of others, and the meeting itself
    group.inbox.receive(0.01)
    assert group.own.kinds == ""
    group.executor.launch(decode_plan(0, 1))
    assert group.told == [6] and not group.executor.idle()


def test_a_group_that_leaves_waits_for_the_others() -> None:
    group, closed = Group(), []
    group.own.close = lambda: closed.append([command for command, _ in group.own.commands])  # type: ignore[attr-defined]
    group.own.control = lambda command: group.own.commands.append((command, ended)) or ended  # type: ignore[method-assign]
    ended = Pending()
    ended.done = True
    group.executor.close()
    assert closed == [[MeetGroups()]]


# What groups exchange -------------------------------------------------------------------------------------------------


def on_groups(groups: list[ThreadAttentionGroup], work: Callable[[ThreadAttentionGroup], Any]) -> list[Any]:
    def run(group: ThreadAttentionGroup) -> Any:
        try:
            return work(group)
        except BaseException:
            group.give_up()
            raise

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(run, groups))


def test_rows_of_all_groups_meet_and_each_gets_its_own_back() -> None:
    def work(group: ThreadAttentionGroup) -> None:
        number = group.topology.dp_rank
        for counts in ((1, 5, 2), (4, 1, 1)):
            rows = [torch.arange(count * 4.0).view(count, 4) + 100 * n for n, count in enumerate(counts)]
            group.begin_step(counts[number])
            found = group.gather_rows(rows[number])
            assert torch.equal(found, torch.cat(rows)) and torch.equal(group.own_rows(found), rows[number])

    on_groups(attention_groups(3, 1), work)


def test_groups_meet_between_steps_and_one_that_declines_is_heard_by_all() -> None:
    def work(group: ThreadAttentionGroup) -> tuple[bool, bool, int, int]:
        joins: list[int] = []

        def join() -> None:
            group.begin_step(1)
            joins.append(1)

        number = group.topology.dp_rank
        for _ in range(3 * number):  # the second group runs three steps before it comes
            group.begin_step(7)
        first = group.meet(True, join)
        return first, group.meet(number == 0, join), len(joins), group.turns_taken

    assert on_groups(attention_groups(2, 1), work) == [(True, False, 3, 5), (True, False, 0, 5)]


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_command_is_done_by_all_groups_or_by_none(refusing: int) -> None:
    def work(group: ThreadAttentionGroup) -> str:
        class Control(ModelControl):
            def _run(self, command: Command) -> CommandResult:
                return CommandResult("done")

        control = Control(None, None, group, join=lambda: None)  # type: ignore[arg-type]
        assert control.run(Wake()).message == "done"
        with pytest.raises(RequestError) as caught:
            control.run(Decline("3 requests run") if group.topology.dp_rank == refusing else Sleep())
        return str(caught.value)

    told = on_groups(attention_groups(2, 2), work)
    expected = ["Another replica refuses it."] * 4
    expected[2 * refusing : 2 * refusing + 2] = ["3 requests run"] * 2
    assert told == expected


# Schedulers on groups -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("lockstep")
    return {name: write_checkpoint(base / name, 3, **MODELS[name]) for name in ("moe", "latent", "states")}


class Box:
    """The messages of one group's scheduler, from any thread."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()

    def receive(self, timeout_s: float | None) -> list[Any]:
        found = []
        try:
            found.append(self.queue.get(timeout_s != 0.0, timeout_s))
            while True:
                found.append(self.queue.get_nowait())
        except queue.Empty:
            return found


class Play(FakeOutbox):
    """What one group's requests got. Behind its n-th message the others, and it, are sent what `cues[n]` says."""

    def __init__(self, boxes: list[Box], cues: dict[int, list[tuple[int, ToScheduler]]], ended: Callable[[], None]):
        super().__init__()
        self.boxes, self.cues, self.on_end, self.count = boxes, cues, ended, 0

    def tokens(self, message: Any) -> None:
        before = len(self.ended)
        super().tokens(message)
        self.count += 1
        for number, sent in self.cues.get(self.count, ()):
            self.boxes[number].queue.put(sent)
        for _ in range(len(self.ended) - before):
            self.on_end()


PROMPTS = {
    handle: np.random.default_rng(handle).integers(0, VOCAB, length).tolist()
    for handle, length in enumerate((3, 40, 17, 5, 29, 1, 33, 8, 21, 2))
}
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


def request(handle: int, **options: Any) -> ToScheduler:
    return generate(handle, PROMPTS[handle], **{**GREEDY, **options})


@functools.cache
def of_one_rank(folder: Path) -> dict[int, list[int]]:
    def use(executor: Any) -> dict[int, list[int]]:
        bench = Bench(executor)
        for handle, prompt in PROMPTS.items():
            bench.ask(handle, prompt, **GREEDY)
        bench.run()
        return dict(bench.out.outputs)

    return alone(folder, use)


def play(
    folder: Path,
    sent: list[list[ToScheduler]],
    cues: dict[int, list[tuple[int, ToScheduler]]],
    requests: int,
    size: int = 1,
    ep_size: int = 1,
    constrained: bool = False,
    **flags: Any,
) -> list[Play]:
    """What groups of `size` ranks got: `sent` are their first messages, `cues` are the first one's. All leave when so
    many requests have ended."""
    count = len(sent)
    groups, boxes = attention_groups(count, size, ep_size), [Box() for _ in sent]
    sizes = {"tp_size": count * size, "dp_size": count, "ep_size": ep_size, "enable_dp_attention": True}
    settings = Settings.from_flat({**FLAGS, **sizes, **flags})
    left, lock = [requests], threading.Lock()

    def ended() -> None:
        with lock:
            left[0] -= 1
        for box in boxes if not left[0] else ():
            box.queue.put(Shutdown())

    plays = [Play(boxes, cues if number == 0 else {}, ended) for number in range(count)]
    ways = [Orders() for _ in groups]
    for box, messages in zip(boxes, sent, strict=True):
        for message in messages:
            box.queue.put(message)

    def work(group: ThreadAttentionGroup) -> None:
        executor, place = build_executor(locate(str(folder)), settings, group).executor, group.topology
        if place.tp_rank:
            follow(executor, ways[place.rank])
            return
        followers = ways[place.rank + 1 : place.rank + size]
        others = [box.queue for number, box in enumerate(boxes) if number != place.dp_rank]
        leader = LeadingExecutor(executor, lambda message: [way.send(message) for way in followers] and None)
        lockstep = LockstepExecutor(leader, group, lambda message: [box.put(message) for box in others] and None)
        inbox, own = LockstepInbox(boxes[place.dp_rank].receive, lockstep), plays[place.dp_rank]
        scheduling = SchedulerSettings(schedule_conservativeness=0.0)
        shapes = {"grammars": FakeGrammars(), "eos_ids": (EOS,)} if constrained else {}
        Scheduler(lockstep, inbox, own, memory=MemorySettings(), settings=scheduling, **shapes).run()
        lockstep.close()

    on_groups(groups, work)
    assert len({group.turns_taken for group in groups}) == 1
    return plays


@pytest.mark.parametrize(
    ("model", "groups", "size", "ep_size", "flags"),
    [
        ("moe", 2, 1, 1, {}),
        ("latent", 2, 2, 1, {"check_ranks": True}),
        ("latent", 2, 1, 2, {"moe_a2a_backend": "torch"}),
        ("latent", 2, 2, 4, {"moe_a2a_backend": "torch", "ep_num_redundant_experts": 2}),
        ("moe", 4, 1, 4, {}),
        ("states", 2, 1, 1, {}),
    ],
)
def test_groups_with_different_loads_give_the_tokens_of_one_rank(
    folders: dict[str, Path], model: str, groups: int, size: int, ep_size: int, flags: dict[str, Any]
) -> None:
    """The second group gets requests when the first has run for a while, and runs on alone; others never have any."""
    doomed = generate(10, [90] * 9, **{**GREEDY, "max_new_tokens": 80})
    sent: list[list[ToScheduler]] = [
        [doomed, *(request(handle) for handle in range(6))],
        *([] for _ in range(1, groups)),
    ]
    cues = {15: [(1, request(handle)) for handle in range(6, 10)], 20: [(0, Abort(10))]}
    plays = play(folders[model], sent, cues, 11, size, ep_size, **flags)
    assert sum(plays[0].retractions.values()) > 0 and 0 < len(plays[0].outputs.pop(10)) < 80
    assert set(plays[0].ended) == {*range(6), 10} and set(plays[1].ended) == set(range(6, 10))
    assert {**plays[0].outputs, **plays[1].outputs} == of_one_rank(folders[model])


def test_grammars_of_one_group_hold_its_steps_up_and_no_token_of_another(folders: dict[str, Path]) -> None:
    """Both groups have one, beside requests without; that of the second begins while the first is in the middle."""
    shaped = {handle: {"regex": grammar(PLACES), "ignore_eos": False} for handle in (2, 7)}

    def use(executor: Any) -> dict[int, list[int]]:
        bench = Bench(executor, eos_ids=(EOS,), grammars=FakeGrammars())  # type: ignore[arg-type]
        for handle in (1, 2, 6, 7):
            bench.ask(handle, PROMPTS[handle], **{**GREEDY, **shaped.get(handle, {})})
        bench.run()
        return dict(bench.out.outputs)

    cues = {4: [(1, request(7, **shaped[7])), (1, request(6))]}
    plays = play(folders["moe"], [[request(1), request(2, **shaped[2])], []], cues, 4, constrained=True)
    expected = alone(folders["moe"], use)
    assert {**plays[0].outputs, **plays[1].outputs} == expected and set(plays[1].outputs) == {6, 7}
    for handle in (2, 7):
        text = b"".join(PIECES[token] for token in expected[handle])
        assert len(text) == len(PLACES) and all(byte in place for byte, place in zip(text, PLACES, strict=True))


def test_a_command_waits_for_the_requests_of_all_groups(folders: dict[str, Path], tmp_path: Path) -> None:
    """The second group has nothing to do when it comes, and takes part in the steps of the first until that has ended
    its request; both then have other weights, for the requests behind the command."""
    other = write_checkpoint(tmp_path, 4, **MODELS["moe"])
    swap = Control(call=1, command=SwapWeights(str(other)), wait=True, flush_cache=True)
    behind = [(number, message) for number, handle in ((0, 2), (1, 3)) for message in (swap, request(handle))]
    plays = play(folders["moe"], [[request(1)], []], {6: behind}, 3)
    before, after = of_one_rank(folders["moe"]), of_one_rank(other)
    assert plays[0].outputs == {1: before[1], 2: after[2]} and plays[1].outputs == {3: after[3]}
    assert before[3] != after[3] and [each.replies[0].ok for each in plays] == [True, True]


def test_a_command_that_one_group_refuses_is_left_by_all(folders: dict[str, Path]) -> None:
    sleep = Control(call=1, command=Sleep(), flush_cache=True)
    plays = play(folders["moe"], [[request(1)], []], {6: [(0, sleep), (1, sleep), (1, request(2))]}, 2)
    expected = of_one_rank(folders["moe"])
    assert plays[0].outputs == {1: expected[1]} and plays[1].outputs == {2: expected[2]}
    first, second = (each.replies[0] for each in plays)
    assert not first.ok and "1 requests run or wait" in first.message
    assert not second.ok and second.message == "Another replica refuses it."


def test_a_group_that_is_paused_takes_part_in_the_steps_of_others(folders: dict[str, Path]) -> None:
    pause, resume = Pause(call=1, mode="in_place"), Resume(call=2)
    plays = play(folders["moe"], [[request(1)], [request(2)]], {3: [(1, pause)], 18: [(1, resume)]}, 2)
    assert {**plays[0].outputs, **plays[1].outputs} == {n: of_one_rank(folders["moe"])[n] for n in (1, 2)}


@pytest.mark.parametrize(("model", "size", "backend"), [("moe", 1, "none"), ("latent", 1, "torch"), ("moe", 2, "none")])
def test_experts_move_between_groups_and_no_token_changes(
    folders: dict[str, Path], model: str, size: int, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while the second group has nothing to do, and while it waits with a command for the first."""
    flags = {"enable_eplb": True, "eplb_rebalance_num_iterations": 3, "ep_num_redundant_experts": 2}
    sleep, wake = (Control(call=n, command=command, wait=True) for n, command in ((1, Sleep()), (2, Wake())))
    cues = {12: [(1, request(2)), (1, sleep), (0, sleep), (1, wake), (0, wake), (0, request(3)), (1, request(4))]}
    with caplog.at_level("INFO", "bough.executor.control"):
        plays = play(
            folders[model], [[request(0), request(1)], []], cues, 5, size, 2 * size, moe_a2a_backend=backend, **flags
        )
    found, expected = {**plays[0].outputs, **plays[1].outputs}, of_one_rank(folders[model])
    assert found == {handle: expected[handle] for handle in range(5)} and all(each.replies[0].ok for each in plays)
    told = [record.getMessage() for record in caplog.records if "rebalanced" in record.getMessage()]
    assert len(told) > 3 and any("has read" in text for text in told) and not any("could not" in text for text in told)


def test_sizes_that_fit_are_those_of_groups(folders: dict[str, Path]) -> None:
    config = resolve_config(locate(str(folders["moe"])), Settings.from_flat(FLAGS))
    check_split(config, 8, groups=2)  # attention is cut by 4, the inner widths by 8
    with pytest.raises(SettingsError, match=r"--tp-size 6: num_heads \(8\) .* Sizes that fit this model: 2, 4, 8"):
        check_split(config, 6, groups=2)
