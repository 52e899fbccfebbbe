"""The executor over a tiny model: rows, pages and logprobs as the scheduler's plans describe them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bough.attention.registry import BackendNames
from bough.core.errors import SettingsError
from bough.core.plan import BatchPlan, InputLogprobs, Limits, LogprobSpec, PageSwap, RowSetup
from bough.core.sampling_params import SamplingParams
from bough.core.settings import MemorySettings, ModelSettings, Settings
from bough.executor.build import build_executor, check_cache_readers, check_deterministic, tell_kernels
from bough.executor.load_model import resolve_config
from bough.executor.sizing import CacheSize, size_cpu_cache
from bough.executor.verification import HostRows
from bough.kernels.quant_linear.packed import Format, variant
from bough.loader.locate import locate
from bough.native.library import load_library

NONE = np.zeros(0, dtype=np.int32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def setup(row: int, pages: np.ndarray = NONE, length: int = 0, logprobs: LogprobSpec | None = None) -> RowSetup:
    return RowSetup(row, SamplingParams(temperature=0.0), 0, (pages,), length, 0, None, 4, logprobs, ())


def plan(
    step: int, rows: list[int], query: list[int], given: list[int], tokens: list[int], **more: object
) -> BatchPlan:
    counts = more.pop("counts", [0] * len(rows))
    return BatchPlan(
        step=step,
        setups=more.pop("setups", ()),  # type: ignore[arg-type]
        edits=more.pop("edits", ()),  # type: ignore[arg-type]
        rows=ints(*rows),
        query_lens=ints(*query),
        given=ints(*given),
        tokens=ints(*tokens),
        new_pages=(more.pop("pages", NONE),),  # type: ignore[arg-type]
        new_page_counts=(ints(*counts),),  # type: ignore[misc]
        sample=np.array(more.pop("sample", [True] * len(rows))),
        input_logprobs=more.pop("inputs", ()),  # type: ignore[arg-type]
    )


def test_rows_take_pages_tokens_and_swaps_in_order() -> None:
    rows = HostRows(Limits(4, 2, (20,), 16, 50, 8, ""))
    layout = rows.apply(
        plan(0, [2, 1], [3, 2], [3, 2], [7, 8, 9, 5, 6], setups=(setup(2, ints(4), 2), setup(1)),
             pages=ints(6, 7, 9), counts=[2, 1])
    )  # fmt: skip
    assert layout.token_ids.tolist() == [7, 8, 9, 5, 6] and layout.positions.tolist() == [2, 3, 4, 0, 1]
    assert layout.slots[0].tolist() == [12, 13, 14, 18, 19] and layout.context_lens.tolist() == [2, 0]
    rows.last_tokens[[2, 1]] = 30, 31
    swap = PageSwap(2, 0, 1, ints(11))
    layout = rows.apply(plan(1, [1, 2], [1, 2], [0, 1], [40], edits=(swap,), pages=ints(3), counts=[1, 0]))
    assert layout.token_ids.tolist() == [31, 30, 40], "a decode begins with the row's last token, then the given ones"
    assert layout.slots[0].tolist() == [6, 15, 0] or layout.slots[0].tolist()[:2] == [6, 15]
    assert rows.mirror.pages[0][2, :3].tolist() == [4, 11, 7]


@pytest.fixture(scope="module")
def executor(tiny_model: Path):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    settings = Settings.from_flat({"load_format": "dummy", "max_total_tokens": 256, "cpu_threads": 1})
    loaded = build_executor(locate(str(tiny_model)), settings)
    yield loaded.executor
    loaded.executor.close()


def test_prompt_logprobs_of_chunks_equal_those_of_the_whole(executor) -> None:  # type: ignore[no-untyped-def]
    tokens = [5, 9, 17, 33, 65, 2]
    spec = LogprobSpec(top=2, ids=(3,))
    whole = executor.launch(
        plan(0, [0], [6], [6], tokens, setups=(setup(0, logprobs=spec),), pages=ints(*range(1, 7)), counts=[6],
             inputs=(InputLogprobs(0, 0, 5, -1),))
    ).wait()  # fmt: skip
    first = executor.launch(
        plan(1, [1], [4], [4], tokens[:4], setups=(setup(1, logprobs=spec),), pages=ints(*range(11, 15)), counts=[4],
             sample=[False], inputs=(InputLogprobs(0, 1, 3, tokens[4]),))
    ).wait()  # fmt: skip
    second = executor.launch(
        plan(2, [1], [2], [2], tokens[4:], pages=ints(15, 16), counts=[2], inputs=(InputLogprobs(0, 0, 1, -1),))
    ).wait()
    joined = np.concatenate([first.input_logprobs[0].logprobs, second.input_logprobs[0].logprobs])
    assert whole.input_logprobs[0].tokens.tolist() == tokens[1:]
    assert joined == pytest.approx(whole.input_logprobs[0].logprobs[1:], abs=1e-5)
    assert first.tokens.shape == (0, 1) and second.tokens.tolist() == whole.tokens.tolist()
    assert whole.output_logprobs[0].top_ids.shape == (1, 2) and whole.output_logprobs[0].id_logprobs.shape == (1, 1)


def test_sixteen_bit_weights_work(tiny_model: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        flat = {"load_format": "dummy", "max_total_tokens": 64, "cpu_threads": 1, "dtype": dtype}
        loaded = build_executor(locate(str(tiny_model)), Settings.from_flat(flat))
        result = loaded.executor.launch(
            plan(0, [0], [3], [3], [5, 6, 7], setups=(setup(0),), pages=ints(1, 2, 3), counts=[3])
        ).wait()
        assert not result.bad.any()
        loaded.executor.close()


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"json_model_override_args": "{"}, "not valid JSON"),
        ({"json_model_override_args": "[1]"}, "JSON object"),
        ({"simulate_routing": "uniform"}, "models with experts, which LlamaForCausalLM has not"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size"),
        ({"chunked_prefill_size": 8, "page_size": 16}, "at least one page"),
        pytest.param({"kv_cache_dtype": "fp8_e4m3", "device": "cpu"}, "needs a GPU", id="fp8 cache"),
        pytest.param({"quantization": "fp8", "device": "cpu"}, "needs a GPU", id="fp8 weights"),
        ({"decode_attention_backend": "flashinfer"}, "does not ship"),
        (
            {"enable_deterministic_inference": True, "device": "cpu", "attention_backend": "torch"},
            "--enable-deterministic-inference needs the native kernels",
        ),
        ({"quantization": "int8", "device": "cpu", "attention_backend": "torch"}, "torch attention is asked for"),
        ({"quantization": "int4", "device": "cpu", "dtype": "bfloat16"}, "compute in float32"),
    ],
)
def test_settings_that_make_no_sense_together(tiny_model: Path, flat: dict[str, object], words: str) -> None:
    settings = Settings.from_flat({"load_format": "dummy", "max_total_tokens": 64, "cpu_threads": 1, **flat})
    with pytest.raises(SettingsError, match=words):
        build_executor(locate(str(tiny_model)), settings)


def test_quantising_needs_the_native_kernels(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them torch computes in float32, which is not what was asked for."""
    monkeypatch.setattr("bough.executor.build.load_library", lambda: None)
    monkeypatch.setattr("bough.native.library.find_library", lambda: None)
    settings = Settings.from_flat({"load_format": "dummy", "device": "cpu", "quantization": "int8"})
    with pytest.raises(SettingsError, match="bough build-kernels"):
        build_executor(locate(str(tiny_model)), settings)


def test_without_the_native_kernels_torch_computes_and_one_line_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bough.executor.build.load_library", lambda: None)
    monkeypatch.setattr("bough.native.library.find_library", lambda: None)
    settings = Settings.from_flat({"load_format": "dummy", "device": "cpu", "cpu_threads": 1, "max_total_tokens": 64})
    build_executor(locate(str(tiny_model)), settings).executor.close()
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "torch computes" in line and "bough build-kernels" in line


@pytest.mark.skipif(load_library() is None, reason="the CPU kernels are not compiled")
def test_the_log_names_the_kernels_that_are_used(caplog: pytest.LogCaptureFixture) -> None:
    """Weights of float32 have no other way for prompts; 8-bit ones have on some CPUs."""
    caplog.set_level("INFO")
    rows, prompts = variant(Format.Q8), variant(Format.Q8, prompt=True)
    both = rows if rows == prompts else f"{rows}, {prompts} for prompts"
    tell_kernels([Format.F32], 1, torch.float32)
    tell_kernels([Format.Q8, Format.F32], 2, torch.float16)
    assert [record.getMessage() for record in caplog.records] == [
        f"native kernels ({rows}) on 1 thread, KV cache of torch.float32",
        f"native kernels ({both}) on 2 threads, KV cache of torch.float16",
    ]


def test_8_bit_caches_have_their_own_readers() -> None:
    check_cache_readers("fp8_e4m3", BackendNames("triton", "triton"))
    check_cache_readers("auto", BackendNames("torch", "torch"))
    with pytest.raises(SettingsError, match="use triton"):
        check_cache_readers("fp8_e5m2", BackendNames("triton", "torch"))


def test_deterministic_inference_has_its_own_attention_and_products() -> None:
    triton, torchs = BackendNames("triton", "triton"), BackendNames("torch", "triton")
    check_deterministic(ModelSettings(enable_deterministic_inference=True), triton, "cuda")
    check_deterministic(ModelSettings(), torchs, "cuda")
    with pytest.raises(SettingsError, match="leave the torch attention"):
        check_deterministic(ModelSettings(enable_deterministic_inference=True), torchs, "cuda")
    with pytest.raises(SettingsError, match="fp8"):
        check_deterministic(ModelSettings(enable_deterministic_inference=True, quantization="fp8"), triton, "cuda")


def test_the_context_can_be_set_and_overrides_reach_the_config(tiny_model: Path) -> None:
    settings = Settings.from_flat({"context_length": 99, "json_model_override_args": '{"rms_norm_eps": 0.5}'})
    config = resolve_config(locate(str(tiny_model)), settings)
    assert config.context_length == 99 and config.norm_eps == 0.5


def test_the_routing_of_experts_can_be_simulated(tiny_model: Path) -> None:
    mixtral = json.dumps({"architectures": ["MixtralForCausalLM"]})
    flat = {"json_model_override_args": mixtral}
    for extra, expected in (({}, ""), ({"simulate_routing": "uniform"}, "uniform")):
        config = resolve_config(locate(str(tiny_model)), Settings.from_flat(flat | extra))
        assert config.moe is not None and config.moe.simulate == expected


def test_mapped_weights_leave_less_room_for_the_cache(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped counts as free memory before and after it is loaded."""
    free = 16 << 20
    monkeypatch.setattr("bough.executor.build.free_memory_bytes", lambda: free)
    monkeypatch.setattr("bough.executor.load_model.free_memory_bytes", lambda: free)
    settings = Settings.from_flat(
        {"load_format": "dummy", "device": "cpu", "cpu_threads": 1, "context_length": 1 << 20}
    )
    sized: dict[str, int] = {}

    def size(settings: MemorySettings, **measured: int) -> CacheSize:
        sized.update(measured)
        return size_cpu_cache(settings, **measured)

    monkeypatch.setattr("bough.executor.build.size_cpu_cache", size)
    build_executor(locate(str(tiny_model)), settings).executor.close()
    assert sized["weight_bytes"] > 0 and sized["free_bytes"] == free - sized["weight_bytes"]
