"""Encoders, pooling and label heads against transformers, on tiny random weights: the same vectors in any company."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from bough.attention.registry import BackendNames
from bough.attention.torch_backend import TorchAttention
from bough.core.control import TakeTensors
from bough.core.plan import Limits
from bough.core.pooling import Pooling, PoolingMode
from bough.core.settings import Settings
from bough.executor import build
from bough.executor.build import build_executor
from bough.executor.load_model import LoadedWeights
from bough.loader.locate import locate
from bough.scheduler.loop import Scheduler
from tests.fakes.boxes import FakeInbox, FakeOutbox, generate
from tests.fakes.native import NATIVE
from tests.loader.test_loader_encoders import one_by_one

TOLERANCE = 1e-4
AS_TRAINED = Pooling()
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "pad_token_id": 1,
    "initializer_range": 0.2,
}
LABELS = {"num_labels": 3}
DECODER = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128}
Make = Callable[..., transformers.PreTrainedModel]


def make(kind: str, config: str, **fields: Any) -> Make:
    def built(**more: Any) -> transformers.PreTrainedModel:
        stated = getattr(transformers, config)(**{**SIZES, **fields, **more}, attn_implementation="eager")
        return getattr(transformers, kind)(stated).eval()

    return built


BERT = {"max_position_embeddings": 64}
ROBERTA = {"max_position_embeddings": 66, "type_vocab_size": 1}
MODERN = {"max_position_embeddings": 64, "local_attention": 8, "num_hidden_layers": 4}
ENCODERS = {
    "bert": make("BertModel", "BertConfig", **BERT),
    "roberta": make("RobertaModel", "RobertaConfig", **ROBERTA),
    "xlm-roberta": make("XLMRobertaModel", "XLMRobertaConfig", **ROBERTA),
    "modernbert": make("ModernBertModel", "ModernBertConfig", **MODERN),
    "nomic": make("NomicBertModel", "NomicBertConfig", max_position_embeddings=64),
}
DECODERS = {
    "qwen3": make("Qwen3Model", "Qwen3Config", **DECODER),
    "mistral": make("MistralModel", "MistralConfig", **DECODER, sliding_window=None),
}
CLASSIFIERS = {
    "bert": make("BertForSequenceClassification", "BertConfig", **BERT, **LABELS),
    "xlm-roberta": make("XLMRobertaForSequenceClassification", "XLMRobertaConfig", **ROBERTA, **LABELS),
    "modernbert": make("ModernBertForSequenceClassification", "ModernBertConfig", **MODERN, **LABELS),
    "modernbert-mean": make(
        "ModernBertForSequenceClassification", "ModernBertConfig", **MODERN, **LABELS, classifier_pooling="mean"
    ),
    "qwen2-reward": make("Qwen2ForSequenceClassification", "Qwen2Config", **DECODER, num_labels=1),
    "llama": make("LlamaForSequenceClassification", "LlamaConfig", **DECODER, **LABELS),
}


class LocalVectors:
    """Scheduler and executor in this process, whose requests end with vectors."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        settings = Settings.from_flat({"max_running_requests": 4, "cpu_threads": 1, **flags})
        loaded = build_executor(locate(str(folder)), settings)
        self.limits, self._executor = loaded.executor.limits(), loaded.executor
        self._inbox, self.out, self._handles = FakeInbox(), FakeOutbox(), 0
        memory, scheduling = settings.memory, settings.scheduler
        self._scheduler = Scheduler(loaded.executor, self._inbox, self.out, memory=memory, settings=scheduling)

    def __call__(self, prompts: Sequence[list[int]], pooling: Sequence[Pooling] | Pooling = AS_TRAINED) -> np.ndarray:
        handles = range(self._handles, self._handles + len(prompts))
        self._handles += len(prompts)
        wanted = [pooling] * len(prompts) if isinstance(pooling, Pooling) else pooling
        for handle, prompt, each in zip(handles, prompts, wanted, strict=True):
            self._inbox.pending.append(generate(handle, prompt, max_new_tokens=0, pooling=each))
        while not all(handle in self.out.ended for handle in handles):
            self._scheduler.turn()
            assert not self._scheduler._batch.audit().problems
        return np.stack([np.frombuffer(self.out.vectors[handle], dtype=np.float32) for handle in handles])

    def take(self, path: Path) -> None:
        """The tensors of a file, in the place of those that the model has."""
        self._executor.control(TakeTensors((str(path),))).wait()
        self._scheduler._cache.flush()

    def cached(self, handle: int) -> int:
        return int(self.out.started[handle].cached_tokens)

    def close(self) -> None:
        self._executor.close()


def saved(model: transformers.PreTrainedModel, folder: Path, **pooling: Any) -> Path:
    torch.manual_seed(0)
    for parameter in model.parameters():  # norms and biases too, which begin as ones and zeros
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    if pooling:
        names = ["Transformer", "Pooling", *(["Normalize"] if pooling.pop("normalize", False) else [])]
        modules = [{"idx": i, "path": f"{i}_{name}", "type": f"models.{name}"} for i, name in enumerate(names)]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def texts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 101, size).tolist() for size in (1, 2, 5, 17, 33, 64, 40, 9, 64)]


def pooled(states: torch.Tensor, mode: PoolingMode, normalize: bool) -> np.ndarray:
    """As sentence-transformers defines it, for one text without padding."""
    vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[mode]
    return (torch.nn.functional.normalize(vector, dim=0) if normalize else vector).numpy()


@torch.inference_mode()
def hidden(model: transformers.PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).last_hidden_state[0]


@torch.inference_mode()
def scores(model: transformers.PreTrainedModel, prompt: list[int], **more: torch.Tensor) -> np.ndarray:
    return model(torch.tensor([prompt]), **more).logits[0].numpy()


def copied(array: np.ndarray) -> torch.Tensor:
    """As an array's way to a GPU does: what is written to it later changes nothing."""
    return torch.from_numpy(array).clone()


def attend_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """The attention that models with vectors have there; Triton's interpreter computes that of decoders."""
    if torch.cuda.is_available():
        pytest.skip("a machine with a GPU interprets no kernels")
    from bough.executor import cuda_parts

    def attention_on(loaded: LoadedWeights, settings: Settings, limits: Limits) -> Any:
        if loaded.config.causal:
            return cuda_parts.build_attention(loaded, settings, limits, copied), copied, lambda: None
        return TorchAttention(copied, together=True, packed=packed), copied, lambda: None

    settled = BackendNames("triton", "triton")
    monkeypatch.setattr(cuda_parts, "choose_backends", lambda settings, device: settled)
    monkeypatch.setattr(build, "_attention_on", attention_on)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_by_one)  # imported late: it is slow


@pytest.mark.parametrize("backend", [NATIVE, "torch", "as on a GPU", "packed as on a GPU"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_give_the_vectors_of_transformers(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, backend) == ("modernbert", "native"):
        pytest.skip("windows to both sides are not recorded")
    if "GPU" in backend:
        attend_as_on_a_gpu(monkeypatch, packed=backend.startswith("packed"))
        backend = "torch"
    model = ENCODERS[name]()
    ours = LocalVectors(saved(model, tmp_path), attention_backend=backend, max_total_tokens=160)
    assert ours.limits.whole_prompts
    for mode in ("mean", "cls", "last"):
        expected = np.stack([pooled(hidden(model, text), mode, normalize=False) for text in texts()])
        assert np.abs(ours(texts(), Pooling(mode=mode, normalize=False)) - expected).max() < TOLERANCE
    ours.close()


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "lasttoken"])
def test_pooling_is_as_the_files_of_sentence_transformers_say(mode: str, tmp_path: Path) -> None:
    model = ENCODERS["bert"]()
    ours = LocalVectors(saved(model, tmp_path, normalize=True, **{f"pooling_mode_{mode}": True}))
    short: PoolingMode = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}[mode]  # type: ignore[assignment]
    expected = np.stack([pooled(hidden(model, text), short, normalize=True) for text in texts()])
    assert np.abs(ours(texts()) - expected).max() < TOLERANCE
    cut = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
    assert np.abs(ours(texts(), Pooling(dimensions=16)) - cut).max() < TOLERANCE
    ours.close()


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_pool_over_chunks_and_cached_prefixes(name: str, tmp_path: Path) -> None:
    model = DECODERS[name]()
    ours = LocalVectors(saved(model, tmp_path), chunked_prefill_size=16)
    assert not ours.limits.whole_prompts
    expected = np.stack([pooled(hidden(model, text), "last", normalize=True) for text in texts()])
    assert np.abs(ours(texts()) - expected).max() < TOLERANCE
    again = len(texts())
    assert np.abs(ours(texts()) - expected).max() < TOLERANCE
    assert ours.cached(again + 5) >= 48  # of 64 tokens, in whole pages or single ones
    means = np.stack([pooled(hidden(model, text), "mean", normalize=False) for text in texts()])
    assert np.abs(ours(texts(), Pooling("mean", False)) - means).max() < TOLERANCE
    assert ours.cached(2 * again + 5) == 0
    ours.close()


@pytest.mark.slow
def test_decoders_pool_with_the_attention_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend_as_on_a_gpu(monkeypatch, packed=False)
    model, some = DECODERS["qwen3"](num_hidden_layers=1), texts()[2:5]
    ours = LocalVectors(saved(model, tmp_path), chunked_prefill_size=16, attention_backend="torch")
    expected = np.stack([pooled(hidden(model, text), "last", normalize=True) for text in some])
    for _ in range(2):
        assert np.abs(ours(some) - expected).max() < TOLERANCE
    assert ours.cached(2 * len(some) - 1) >= 32
    ours.close()


UPDATED = [
    *(ENCODERS[name] for name in ("bert", "modernbert", "nomic")),
    *(DECODERS["qwen3"], CLASSIFIERS["llama"], CLASSIFIERS["bert"]),
]


@pytest.mark.parametrize("built", UPDATED, ids=lambda built: type(built()).__name__)
def test_weights_are_updated_by_the_names_of_transformers_modules(built: Make, tmp_path: Path) -> None:
    model, some = built(), texts()[2:5]
    ours = LocalVectors(saved(model, tmp_path))
    before = ours(some)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand_like(parameter) + 0.5)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "new.safetensors")
    ours.take(tmp_path / "new.safetensors")
    model.save_pretrained(tmp_path / "again")
    again = LocalVectors(tmp_path / "again")
    expected = again(some)
    assert np.abs(ours(some) - expected).max() < 1e-6 < np.abs(before - expected).max()
    ours.close()
    again.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS, *CLASSIFIERS])
def test_vectors_on_a_gpu(name: str, tmp_path: Path) -> None:
    makers = {**CLASSIFIERS, **ENCODERS, **DECODERS}
    model = makers[name]()
    ours = LocalVectors(saved(model, tmp_path), device="cuda", dtype="float32", chunked_prefill_size=16)
    if name in {**ENCODERS, **DECODERS}:
        pooling = Pooling("last", False)
        expected = np.stack([pooled(hidden(model, text), "last", normalize=False) for text in texts()])
    else:
        pooling, expected = AS_TRAINED, np.stack([scores(model, text) for text in texts()])
    for _ in range(2):
        assert np.abs(ours(texts(), pooling) - expected).max() < TOLERANCE
    ours.close()


@pytest.mark.gpu
def test_texts_attended_all_at_once_give_the_same_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = saved(ENCODERS["bert"](), tmp_path), []
    for packed in (True, False):
        if not packed:
            monkeypatch.setattr(
                build, "TorchAttention", lambda to_device, **_: TorchAttention(to_device, together=True)
            )
        ours = LocalVectors(folder, device="cuda", dtype="bfloat16")
        found.append(ours(texts(), Pooling("mean", True)))
        ours.close()
    assert (found[0] * found[1]).sum(1).min() > 0.999


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_give_the_scores_of_transformers(name: str, tmp_path: Path) -> None:
    model = CLASSIFIERS[name]()
    ours = LocalVectors(saved(model, tmp_path))
    expected = np.stack([scores(model, text) for text in texts()])
    assert np.abs(ours(texts()) - expected).max() < TOLERANCE
    ours.close()


def test_a_reward_model_of_two_layers_over_the_last_token(tmp_path: Path) -> None:
    """As the code that comes with Qwen2.5-Math-RM has it: Linear, ReLU, Linear, in a `score` of its own."""
    model = make("Qwen2Model", "Qwen2Config", **DECODER)()
    saved(model, tmp_path)
    size = model.config.hidden_size
    score = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 1))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"score.{name}": tensor for name, tensor in score.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"architectures": ["Qwen2ForRewardModel"]}))
    ours = LocalVectors(tmp_path)
    with torch.inference_mode():
        expected = np.stack([score(hidden(model, text)[-1]).numpy() for text in texts()])
    assert np.abs(ours(texts()) - expected).max() < TOLERANCE and ours(texts()).shape == (len(texts()), 1)
    ours.close()


@pytest.mark.parametrize("backend", [NATIVE, "torch"])
def test_pairs_have_token_types(backend: str, tmp_path: Path) -> None:
    model = CLASSIFIERS["bert"]()
    ours = LocalVectors(saved(model, tmp_path), attention_backend=backend)
    pairs = [(text, len(text) // 2) for text in texts()[2:]]
    kinds = [torch.tensor([[int(i >= second) for i in range(len(text))]]) for text, second in pairs]
    typed = zip(pairs, kinds, strict=True)
    expected = np.stack([scores(model, text, token_type_ids=kind) for (text, _), kind in typed])
    found = ours([text for text, _ in pairs], [Pooling(second=second) for _, second in pairs])
    assert np.abs(found - expected).max() < TOLERANCE
    assert np.abs(ours([text for text, _ in pairs]) - expected).max() > 10 * TOLERANCE  # without types
    ours.close()
