"""The cost model's arithmetic, by hand on small cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bough.core.errors import SettingsError
from bough.distributed import cost_model
from bough.distributed.cost_model import GPUS, Cluster, Gpu, Load, ModelShare, Split, stage_cost, step_cost

GIB = 2**30
ROUND = Gpu(memory_gib=100, bandwidth=1.0, bf16=100.0, fp8=200.0, link=100.0, network=10.0)
ONE = Cluster(ROUND, 8)
TINY = ModelShare(
    layers=((1_000_000, 3_000_000, 0),) * 4,
    embedding=500_000,
    head=500_000,
    tied=True,
    hidden_size=1000,
    vocab_size=500,
    kv_bytes=4000.0,
    decode_flops=8000.0,
    prefill_flops=8000.0,
)


@pytest.fixture(autouse=True)
def ideal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardware that reaches its figures, so that sums can be done in the head."""
    for name in ("MEMORY_SHARE", "CACHE_SHARE", "PRODUCT_SHARE", "ATTENTION_SHARE", "LINK_SHARE"):
        monkeypatch.setattr(cost_model, name, 1.0)
    for name in ("LAYER_S", "LATENT_S", "EXPERTS_S", "ACTIVATION_WIDTHS"):
        monkeypatch.setattr(cost_model, name, 0.0)


@pytest.mark.parametrize(
    ("text", "per_host", "hosts"), [("8xH200", 8, 1), ("8xh200,2", 8, 2), ("1xL40S", 1, 1), ("4xMI300X,64", 4, 64)]
)
def test_gpus_are_parsed(text: str, per_host: int, hosts: int) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.per_host, cluster.hosts) == (per_host, hosts)
    assert cluster.gpu == GPUS[text.split("x", 1)[1].split(",")[0].upper()]


@pytest.mark.parametrize("text", ["", "H200", "8xV100", "0xH200", "8xH200,0", "8xH200,2,2", "8 x H200"])
def test_other_gpus_are_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(SettingsError, match=r"like 8xH200.*A100, B200, H100, H200, L40S, MI300X, MI325X"):
        Cluster.parse(text)


def test_a_step_of_one_rank_is_its_bytes_and_flops() -> None:
    cost = step_cost(TINY, ONE, Split(), Load(decodes=10, context=100))
    assert cost["weights"] == pytest.approx((16_000_000 * 2 + 500_000 * 2) / 1e12)
    assert cost["products"] == pytest.approx(2 * 10 * 16_500_000 / 100e12)
    assert cost["attention"] == pytest.approx(10 * 100 * 4000 / 1e12), "reading takes longer than multiplying"
    assert cost["exchange"] == cost["others"] == 0.0


def test_weights_of_eight_bits_are_half_as_many_bytes_and_multiply_faster() -> None:
    cost = step_cost(replace(TINY, weight_bytes=1.0), ONE, Split(), Load(decodes=10))
    assert cost["weights"] == pytest.approx((16_000_000 + 500_000 * 2) / 1e12)
    assert cost["products"] == pytest.approx(2 * 10 * (16_000_000 / 200e12 + 500_000 / 100e12))


def test_prompts_multiply_what_they_see() -> None:
    cost = step_cost(TINY, ONE, Split(), Load(prompt=1000, prompt_context=500))
    assert cost["attention"] == pytest.approx(1000 * 500 * 8000 / 100e12)


def test_a_window_bounds_what_its_layers_see() -> None:
    share = replace(TINY, window=100.0, window_share=0.75)
    assert share.seen(50) == 50
    assert share.seen(1000) == 0.25 * 1000 + 0.75 * 100


def test_experts_are_read_as_far_as_tokens_draw_them() -> None:
    share = replace(TINY, layers=((0, 0, 8_000_000),), embedding=0, head=0, experts=8, per_token=2)
    assert stage_cost(share, ONE, Split(), Load(decodes=1))["weights"] == pytest.approx(0.25 * 16e6 / 1e12)
    drawn = 1 - 0.75**3
    assert stage_cost(share, ONE, Split(), Load(decodes=3))["weights"] == pytest.approx(drawn * 16e6 / 1e12)
    assert stage_cost(share, ONE, Split(), Load(decodes=3))["products"] == pytest.approx(2 * 3 * 2e6 / 100e12)


def test_exchanges_inside_a_host() -> None:
    """Three hops gather the parts of eight ranks, of which each lacks seven eighths."""
    assert ONE.all_gather_s(8e6, 8) == pytest.approx(7e6 / 100e9 + 3 * 2.5e-6)
    assert ONE.all_to_all_s(8e6, 8) == pytest.approx(7e6 / 100e9 + 2.5e-6)
    assert ONE.all_gather_s(8e6, 1) == 0.0


def test_exchanges_between_hosts() -> None:
    """Sixteen ranks: an eighth of the other host's half comes over each GPU's network."""
    two = Cluster(ROUND, 8, 2)
    assert two.all_gather_s(16e6, 16) == pytest.approx(14e6 / 100e9 + 1e6 / 10e9 + 3 * 2.5e-6 + 6e-6)
    assert two.all_to_all_s(16e6, 16) == pytest.approx(8e6 / 10e9 + 6e-6), "the network is the slower way"


def test_tensor_parallel_sums_twice_in_a_layer() -> None:
    cost = step_cost(TINY, ONE, Split(tp=2), Load(decodes=5))
    summed, logits = 2 * ONE.all_gather_s(5 * 1000 * 2, 2), ONE.all_gather_s(5 * 500 * 2, 2)
    assert cost["exchange"] == pytest.approx((2 * 4 + 1) * summed + logits)


def test_attention_in_groups_computes_its_own_requests_and_gathers_all_for_the_rest() -> None:
    split, load = Split(tp=4, groups=4), Load(decodes=8, context=100)
    cost = step_cost(TINY, ONE, split, load)
    assert cost["attention"] == pytest.approx(2 * 100 * 4000 / 1e12)
    assert cost["products"] == pytest.approx(2 * (2 * 4_000_000 + 8 * 12_500_000) / 100e12)
    summed, logits = 2 * ONE.all_gather_s(8 * 1000 * 2, 4), ONE.all_gather_s(8 * 500 * 2, 4)
    assert cost["exchange"] == pytest.approx((4 + 1) * summed + logits)


def test_spread_experts_get_their_tokens_from_all_ranks() -> None:
    share = replace(TINY, layers=((0, 0, 8_000_000),), embedding=0, head=0, experts=8, per_token=2)
    cost = stage_cost(share, ONE, Split(tp=4, groups=4, ep=4), Load(decodes=8))
    assert cost["exchange"] == pytest.approx(2 * ONE.all_to_all_s(2 * 2 * 1000 * 2, 4))


def test_stages_hold_all_layers_and_one_of_the_vocabularys_matrices_each() -> None:
    stages = replace(TINY, layers=tuple((n, 0, 0) for n in range(5))).stages(2)
    assert [stage.layers for stage in stages] == [((0, 0, 0), (1, 0, 0), (2, 0, 0)), ((3, 0, 0), (4, 0, 0))]
    assert [(stage.embedding, stage.head) for stage in stages] == [(500_000, 0), (0, 500_000)]
    assert stages[0].kv_bytes == pytest.approx(2400) and stages[1].kv_bytes == pytest.approx(1600)
    assert sum(stage.nbytes for stage in stages) == 10 * 2 + 2 * 500_000 * 2, "a tied matrix is on both ends"


def test_a_pipeline_is_full_if_there_are_requests_enough() -> None:
    even = replace(TINY, embedding=0, head=0)
    alone, full = (step_cost(even, ONE, Split(pp=2), Load(decodes=count)) for count in (1, 8))
    assert alone["weights"] == full["weights"] == pytest.approx(32e6 / 1e12), (
        "each stage reads its half, one after the other"
    )
    assert full["products"] == pytest.approx(2 * 4 * 16e6 / 100e12), "with half of the requests each"
    assert alone["exchange"] == pytest.approx(2 * (1 * 1000 * 2 / 100e9 + 2.5e-6))
    far = step_cost(even, Cluster(ROUND, 1, 2), Split(pp=2), Load(decodes=1))
    assert far["exchange"] == pytest.approx(2 * (1 * 1000 * 2 / 10e9 + 6e-6))


@pytest.mark.parametrize(
    ("split", "hosts", "servers", "flags"),
    [
        (Split(tp=4, replicas=2), 1, 1, "--tp-size 4 --dp-size 2"),
        (Split(tp=4, replicas=16), 8, 8, "--tp-size 4 --dp-size 2"),
        (Split(tp=8, ep=8, groups=8, replicas=2), 2, 2, "--tp-size 8 --dp-size 8 --ep-size 8 --enable-dp-attention"),
        (Split(tp=8, pp=2), 2, 1, "--tp-size 8 --pp-size 2 --nnodes 2 --node-rank RANK --dist-init-addr HOST:PORT"),
        (Split(replicas=8), 1, 1, "--dp-size 8"),
    ],
)
def test_what_to_type(split: Split, hosts: int, servers: int, flags: str) -> None:
    assert split.servers(Cluster(ROUND, 8, hosts)) == (servers, flags)
