"""Whatever a rank is told arrives as it was sent: every field of a plan, of masks and of commands."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from bough.core.control import (
    JoinTrainer,
    LeaveTrainer,
    ProfileStart,
    ProfileStop,
    ReadWeight,
    ReceiveTensors,
    SetVersion,
    Sleep,
    SwapWeights,
    TakeTensors,
    Wake,
)
from bough.core.media import Feature
from bough.core.plan import (
    BatchPlan,
    Encode,
    InputLogprobs,
    LogprobSpec,
    PageSwap,
    PositionLogprobs,
    RowSetup,
    StepResult,
    TokenMasks,
)
from bough.core.sampling_params import SamplingParams
from bough.messages.channels import Addresses, Receiver, Sender
from bough.messages.ranks import (
    CopyPages,
    LaunchPlan,
    Leave,
    RunCommand,
    SupplyMasks,
    ToRank,
    UseIdleTime,
    pack_array,
    unpack_array,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


SETUP = RowSetup(
    row=3,
    sampling=SamplingParams(
        temperature=0.5, stop=("a", "b"), logit_bias={7: -1.5}, custom_params={"deep": [1, {"x": None}]}, regex="a+"
    ),
    seed=2**63 - 1,
    pages=(ints(1, 2), ints(4)),
    length=2,
    generated=1,
    history=ints(9, 8, 7),
    prompt_len=2,
    logprobs=LogprobSpec(2, (5, 6)),
    stop_ids=(1, 2),
    processor="code",
    adapter=3,
    delta=-5,
)
PLAN = BatchPlan(
    step=17,
    setups=(SETUP, dataclasses.replace(SETUP, row=4, history=None, logprobs=None, processor=None)),
    edits=(PageSwap(1, 0, 2, ints(3)),),
    rows=ints(1, 3),
    query_lens=ints(1, 4),
    given=ints(0, 4),
    tokens=ints(5, 6, 7, 8),
    new_pages=(ints(4, 5), ints()),
    new_page_counts=(ints(1, 1), ints(0, 0)),
    sample=np.array([True, False]),
    input_logprobs=(InputLogprobs(1, 0, 3, -1),),
    masked=np.array([True, False]),
    last_tokens=ints(9),
    spare=ints(1, 0),
    parents=ints(0),
    common=ints(0),
    next_tokens=ints(3, 4),
    dropped=(4,),
    encodes=(Encode(7, "image", 3, (Feature("pixel_values", "float32", (1, 3, 4, 4), 64),), "file"),),
    media=ints(1, 7, 0, 3).reshape(1, 4),
    positions=np.arange(12, dtype=np.int32).reshape(3, 4),
    undrafted=True,
)
MASKS = TokenMasks(np.array([[1, -1], [0, 2**31 - 1]], dtype=np.int32))
COMMANDS = [
    SwapWeights("folder", "auto"),
    TakeTensors(("/dev/shm/one", "/dev/shm/other")),
    ReceiveTensors(("a", "b"), ("float32", "bfloat16"), ((2, 3), ()), "group"),
    JoinTrainer("127.0.0.1", 29500, 1, 3, "group", "gloo"),
    LeaveTrainer("group"),
    ReadWeight("model.norm.weight", 3),
    SetVersion(),
    Sleep(("weights",)),
    Wake(),
    ProfileStart(output_dir="d", activities=("CPU",), with_stack=True),
    ProfileStop(),
]
encoder = msgspec.msgpack.Encoder(enc_hook=pack_array)
decoder = msgspec.msgpack.Decoder(ToRank, dec_hook=unpack_array)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, field by field."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "message",
    [
        LaunchPlan(PLAN),
        LaunchPlan(dataclasses.replace(PLAN, masked=None, setups=(), edits=(), input_logprobs=())),
        SupplyMasks(17, MASKS),
        UseIdleTime(),
        Leave(),
        CopyPages(ints(3, 1), 1),
        CopyPages(ints(3), 0, np.array([[1, 255]], dtype=np.uint8)),
        *map(RunCommand, COMMANDS),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: ToRank) -> None:
    assert same(decoder.decode(encoder.encode(message)), message)


def test_a_result_arrives_as_it_was_sent() -> None:
    scores = np.array([-0.5, -1.25], dtype=np.float32)
    run = PositionLogprobs(ints(4, 5), scores, scores.reshape(2, 1), ints(6, 7).reshape(2, 1), scores.reshape(1, 2))
    result = StepResult(
        *(17, ints(1, 2).reshape(2, 1), ints(1, 1), np.array([True, False])), {0: run}, {3: run}, (1.5, 2.5)
    )
    results = msgspec.msgpack.Decoder(StepResult, dec_hook=unpack_array)
    found = results.decode(encoder.encode(result))
    assert same(found.output_logprobs.pop(0), run) and same(found.input_logprobs.pop(3), run)
    assert same(found, dataclasses.replace(result, output_logprobs={}, input_logprobs={}))


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(BatchPlan)])
def test_no_field_of_a_plan_is_at_its_default_here(name: str) -> None:
    """Else a field that is left out on the way would not show."""
    (field,) = (f for f in dataclasses.fields(BatchPlan) if f.name == name)
    assert field.default is dataclasses.MISSING or not same(getattr(PLAN, name), field.default)


def test_numbers_of_numpy_become_plain_ones_and_arrays_can_be_written() -> None:
    plan = dataclasses.replace(PLAN, step=np.int64(4))  # type: ignore[arg-type]
    found = decoder.decode(encoder.encode(LaunchPlan(plan)))
    assert isinstance(found, LaunchPlan) and found.plan.step == 4 and type(found.plan.step) is int
    found.plan.rows[0] = 2


def test_what_nobody_knows_is_not_sent() -> None:
    with pytest.raises(NotImplementedError, match="set cannot be sent"):
        pack_array({1})


def test_one_sender_reaches_all_ranks_in_order(tmp_path: Path) -> None:
    addresses = Addresses.in_folder(tmp_path, ranks=3).ranks
    context: zmq.Context[Any] = zmq.Context()
    receivers: list[Receiver[ToRank]] = [Receiver(context, one, ToRank, unpack=unpack_array) for one in addresses]
    sender = Sender(context, *addresses, pack=pack_array)
    sent = [LaunchPlan(PLAN), SupplyMasks(17, MASKS), Leave()]
    for message in sent:
        sender.send(message)
    for receiver in receivers:
        found: list[ToRank] = []
        while len(found) < len(sent):
            found += receiver.receive(None)
        assert all(map(same, found, sent))
        receiver.close()
    sender.close()
    context.term()
