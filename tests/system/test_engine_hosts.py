"""One engine on two hosts: its tokens, and how both end when something of either dies."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import LLAMA, MODELS
from tests.parity.engines import LocalEngine
from tests.system.hosts import KEY, PATIENCE_S, Host, Node, two_hosts
from tests.system.sockets import tree_of

PROMPTS = [[5, 6, 7, 8], [9, 10, 11] * 12, [3], [5, 6, 7, 8, 9], *([number] * 20 for number in range(12, 16))]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SETTINGS = {"device": "cpu", "cpu_threads": 1, "skip_tokenizer_init": True, "max_total_tokens": 250}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hosts") / "llama"
    write_checkpoint(path, 3, **LLAMA)
    return path


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as made:
        yield made


@pytest.fixture
def start(hosts: list[Host]) -> Iterator[Callable[..., Node]]:
    port = 29500
    if hosts[0].address == "127.0.0.1":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    with contextlib.ExitStack() as cleanup:

        def serve(number: int, model: Path, key: str = KEY, tp_size: int = 2, **settings: Any) -> Node:
            address = f"{hosts[0].address}:{port}"
            given = SETTINGS | {"model_path": model, "tp_size": tp_size, "nnodes": 2, "dist_init_addr": address}
            flags = []
            for name, value in (given | settings).items():
                flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
            node = Node(hosts[number], number, flags, key)
            cleanup.callback(node.close)
            return node

        yield serve


def tokens_of(node: Node, prompt: list[int], **fields: Any) -> list[int]:
    answer = node.call("/generate", input_ids=prompt, sampling_params=GREEDY, **fields)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["output_ids"])


SPLITS = [  # with the ranks on each host
    pytest.param({"tp_size": 2}, [], ["TP1"], id="ranks"),
    pytest.param({"tp_size": 4}, ["TP1"], ["TP2", "TP3"], id="more ranks", marks=pytest.mark.long),
    pytest.param({"tp_size": 1, "pp_size": 2}, [], ["PP1 TP0"], id="stages"),
]


@pytest.mark.parametrize(("split", "first", "second"), SPLITS)
def test_two_hosts_give_the_tokens_of_one_rank_and_end_in_order(
    start: Callable[..., Node], model: Path, split: dict[str, int], first: list[str], second: list[str]
) -> None:
    flags = {"device": "cpu", "cpu_threads": 1, "attention_backend": "torch", "max_total_tokens": 1200}
    engine = LocalEngine(model, new=GREEDY["max_new_tokens"], **flags)
    expected = [tokens for tokens, _ in engine.ask(*PROMPTS)]
    nodes = [start(number, model, **split, schedule_conservativeness=0.0) for number in (1, 0)][::-1]
    for node in nodes:
        node.wait_ready()
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        assert list(threads.map(lambda prompt: tokens_of(nodes[0], prompt), PROMPTS)) == expected
    state = nodes[0].call("/server_info").json()
    assert state["nnodes"] == 2 and state["internal_states"][0]["num_retractions"] > 0
    assert len(state["memory_usage"]["weight_of_ranks"]) == 1 + len(first + second)
    assert nodes[1].call("/generate", text="x").status_code == 404
    processes = [tree_of(node.process.pid) for node in nodes]
    titles = [sorted(" ".join(each.cmdline()).strip() for each in tree[1:]) for tree in processes]
    assert titles[0] == ["bough::detokenizer", *(f"bough::executor {rank}" for rank in first), "bough::scheduler"]
    assert titles[1] == [f"bough::executor {rank}" for rank in second]
    assert not [each for tree in processes for each in tree if KEY in " ".join(each.cmdline())]
    nodes[0].process.send_signal(signal.SIGTERM)
    for node, tree in zip(nodes, processes, strict=True):
        code, log = node.wait()
        assert code == 0 and KEY not in log, log
        assert not psutil.wait_procs(tree[1:], timeout=PATIENCE_S)[1]


GROUPS = {"dp_size": 2, "enable_dp_attention": True}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hosts") / "latent"
    write_checkpoint(path, 3, **MODELS["latent"])
    return path


@pytest.mark.parametrize(
    ("split", "ranks"),
    [
        pytest.param({"tp_size": 2, "tokenizer_worker_num": 2}, [], id="one rank each"),
        pytest.param({"tp_size": 4, "dp_size": 4}, [], id="two groups each", marks=pytest.mark.long),
        pytest.param(
            {"tp_size": 4, "ep_size": 4, "moe_a2a_backend": "torch", "check_ranks": True},
            ["TP1"],
            id="two ranks each",
            marks=pytest.mark.long,
        ),
    ],
)
def test_attention_groups_on_two_hosts_give_the_tokens_of_one_rank_and_end_in_order(
    start: Callable[..., Node], latent: Path, split: dict[str, Any], ranks: list[str]
) -> None:
    flags = {"device": "cpu", "cpu_threads": 1, "attention_backend": "torch", "max_total_tokens": 1200}
    engine = LocalEngine(latent, new=GREEDY["max_new_tokens"], **flags)
    expected = [tokens for tokens, _ in engine.ask(*PROMPTS)]
    # A group keeps the tokens of few prompts at once.
    few = {"schedule_conservativeness": 0.0, "max_total_tokens": 120}
    groups = split.get("dp_size", 2)
    nodes = [start(number, latent, **(GROUPS | split), **few) for number in (1, 0)][::-1]
    for node in nodes:
        node.wait_ready()
    for rank in reversed(range(groups)):  # while the others have nothing to do
        assert tokens_of(nodes[0], PROMPTS[1], routed_dp_rank=rank) == expected[1]
    with ThreadPoolExecutor(groups * len(PROMPTS)) as threads:
        all_ranks = [(prompt, rank) for prompt in PROMPTS for rank in range(groups)]
        found = list(threads.map(lambda asked: tokens_of(nodes[0], asked[0], routed_dp_rank=asked[1]), all_ranks))
    assert found == [tokens for tokens in expected for _ in range(groups)]
    state = nodes[0].call("/server_info").json()
    assert [each["dp_rank"] for each in state["internal_states"]] == list(range(groups))
    assert all(each["num_retractions"] > 0 for each in state["internal_states"])
    assert [each["max_total_num_tokens"] for each in state["internal_states"]] == [120] * groups
    processes = [tree_of(node.process.pid) for node in nodes]
    for number, tree in enumerate(processes):
        own = [f" DP{group}" for group in range(number * groups // 2, (number + 1) * groups // 2)]
        wanted = [f"bough::{role}{group}" for group in own for role in ("detokenizer", "scheduler")]
        wanted += [f"bough::executor{group} {rank}" for group in own for rank in ranks]
        titles = [" ".join(each.cmdline()).strip() for each in tree[1:]]
        assert sorted(each for each in titles if "server" not in each) == sorted(wanted)
        assert not [each for each in tree if KEY in " ".join(each.cmdline())]
    nodes[0].process.send_signal(signal.SIGTERM)
    for node, tree in zip(nodes, processes, strict=True):
        code, log = node.wait()
        assert code == 0 and KEY not in log and "did not leave by itself" not in log, log
        assert not psutil.wait_procs(tree[1:], timeout=PATIENCE_S)[1]


KILLS: dict[str, tuple[int, str, str]] = {  # on which host, which process, and what the other host says
    "another host's rank": (1, "executor TP1", "Node 1 has ended: The executor TP1 process (pid "),
    "another host": (1, "", "Node 1 has gone: its connection has ended."),
    "the first host": (0, "", "The first host has ended: its connection was lost."),
    "the scheduler": (0, "scheduler", "The first host has ended: The scheduler process (pid "),
}


GROUP_KILLS: dict[str, tuple[int, str, str]] = {
    "another host's scheduler": (1, "scheduler DP1", "Node 1 has ended: The scheduler DP1 process (pid "),
    "another host's detokenizer": (1, "detokenizer DP1", "Node 1 has ended: The detokenizer DP1 process (pid "),
    "the first group's scheduler": (0, "scheduler DP0", "The first host has ended: The scheduler DP0 process (pid "),
}
# Found in the ways of the others.
ALSO = ("another host", "the scheduler", "another host's detokenizer", "the first group's scheduler")


@pytest.mark.parametrize(
    "victim", [pytest.param(each, marks=pytest.mark.long if each in ALSO else ()) for each in (*KILLS, *GROUP_KILLS)]
)
def test_a_death_ends_both_hosts_with_the_reason(start: Callable[..., Node], model: Path, victim: str) -> None:
    number, title, said = (KILLS | GROUP_KILLS)[victim]
    flags: dict[str, Any] = GROUPS if victim in GROUP_KILLS else {}
    nodes = [start(number, model, **flags) for number in (0, 1)]
    for node in nodes:
        node.wait_ready()
    trees = [each for node in nodes for each in tree_of(node.process.pid)]
    begun = threading.Event()

    def generate() -> None:
        with contextlib.suppress(httpx.HTTPError):
            while nodes[0].call("/generate", input_ids=[5, 6], sampling_params=GREEDY).status_code == 200:
                begun.set()

    asking = threading.Thread(target=generate)
    asking.start()
    assert begun.wait(PATIENCE_S)
    hit = nodes[number]
    (hit.rank(title) if title else hit.process).send_signal(signal.SIGKILL)
    code, log = nodes[1 - number].wait()
    assert code == 1 and said in log.splitlines()[-1], log
    if title:
        code, log = hit.wait()
        assert code == 1 and f"bough: The {title} process (pid " in log and "was killed by SIGKILL." in log, log
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert not psutil.wait_procs(trees, timeout=PATIENCE_S)[1]


@pytest.mark.long
def test_a_host_that_falls_silent_has_gone(start: Callable[..., Node], model: Path) -> None:
    nodes = [start(number, model) for number in (0, 1)]
    for node in nodes:
        node.wait_ready()
    tree = tree_of(nodes[1].process.pid)
    for each in tree:
        each.send_signal(signal.SIGSTOP)
    code, log = nodes[0].wait()
    assert code == 1 and "Node 1 has gone" in log.splitlines()[-1], log
    for each in tree:
        each.send_signal(signal.SIGCONT)
    code, log = nodes[1].wait()
    assert code == 1 and not psutil.wait_procs(tree[1:], timeout=PATIENCE_S)[1], log


def test_hosts_that_do_not_belong_together_say_so(start: Callable[..., Node], model: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", 4, **LLAMA)
    first = start(0, model)
    code, log = start(1, model, key="another secret, as long as the first").wait()
    assert code == 2 and "give both the same BOUGH_CLUSTER_KEY" in log
    assert first.process.poll() is None  # it does not care about strangers
    second = start(1, tmp_path / "other")
    for node in (second, first):
        code, log = node.wait()
        assert code and "Hosts must not differ in the files of the model" in log, log
