"""Every multi-modal family against transformers, on tiny random checkpoints as `save_pretrained` writes them: greedy
tokens and their logprobs with two images of different sizes, with prompts in chunks, cached prefixes and a text beside
them. What an image becomes is transformers' own: here only what encoders make of it is at stake."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bough.core.media import Feature, MediaItem, MediaKind, MediaPrompt, media_ids
from bough.messages.requests import LogprobRequest
from tests.multimodal.checkpoints import as_published
from tests.parity.engines import LocalEngine

VOCAB, NEW, TOLERANCE = 97, 5, 1e-4
IMAGE, VIDEO = 96, 95  # placeholders
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Image:
    """The arrays of one image or clip; text stands between so many parts of it."""

    arrays: dict[str, torch.Tensor]
    parts: int = 1
    kind: MediaKind = "image"
    like_image: bool = False  # a clip whose rows have the token of images

    @property
    def token(self) -> int:
        return IMAGE if self.kind == "image" or self.like_image else VIDEO


@dataclass(frozen=True)
class Case:
    fields: dict[str, Any]
    images: list[Image]  # two
    kinds: str = ""  # the argument by which transformers tells images from text
    positions: bool = False  # several for each token
    text_type: str = "llama"
    token: str = "image_token_id"


def pixels(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tiles(height: int, width: int, count: int, seed: int) -> Image:
    """An image of this size cut into tiles, with the whole before them."""
    return Image(
        {"pixel_values": pixels(1, count, 3, 16, 16, seed=seed), "image_sizes": torch.tensor([[height, width]])}
    )


def patches(*grid: int, seed: int) -> Image:
    """An image of so many patches in time, height and width."""
    values = pixels(math.prod(grid), 3 * 2 * 4 * 4, seed=seed)
    return Image({"pixel_values": values, "image_grid_thw": torch.tensor([grid])})


def sound(frames: int, seed: int) -> Image:
    """A recording of so many frames, padded to as many as any may have."""
    mask = (torch.arange(40) < frames).long()
    return Image({"input_features": pixels(1, 16, 40, seed=seed), "feature_attention_mask": mask[None]}, 1, "audio")


def spectrum(frames: int, seed: int) -> Image:
    """A recording of so many frames, padded to as many as any may have."""
    mask = torch.arange(48) < frames
    values = pixels(1, 48, 128, seed=seed) * mask[:, None]
    return Image({"input_features": values, "input_features_mask": mask[None]}, 1, "audio")


def pooled(columns: int, rows: int, seed: int) -> Image:
    """An image of so many patches, nine of which become a row, padded to as many as any may have."""
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    empty = 36 - len(places)
    values = torch.nn.functional.pad(pixels(len(places), 3 * 4 * 4, seed=seed), (0, 0, 0, empty))
    padding = torch.full((empty, 2), -1)
    return Image({"pixel_values": values[None], "image_position_ids": torch.cat((places, padding))[None]})


SQUARES = [Image({"pixel_values": pixels(1, 3, 16, 16, seed=seed)}) for seed in (1, 2)]
TILED = [tiles(14, 30, 3, seed=1), tiles(32, 32, 5, seed=2)]
GRIDS = [patches(1, 4, 6, seed=1), patches(1, 8, 4, seed=2)]
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
HALF_MROPE = {"rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
HEARING = {
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "num_mel_bins": 16,
    "max_source_positions": 20,
}
GLM = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 12,
}
POOLED = {**CLIP, "model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
PLACED = {**QWEN, **GLM, "num_position_embeddings": 64}
CROPS = [
    Image({"pixel_values": pixels(1, 2, 3, 16, 16, seed=1)}, parts=2),
    Image({"pixel_values": pixels(1, 3, 3, 16, 16, seed=2)}, parts=3),
]
CASES: dict[str, Case] = {
    "llava": Case({"vision_config": CLIP}, SQUARES),
    "qwen2_vl": Case(
        {"text_config": MROPE, "vision_config": {**QWEN, "embed_dim": 32, "hidden_size": 64}},
        *(GRIDS, "mm_token_type_ids", True, "qwen2_vl_text"),
    ),
    "qwen2_5_vl": Case(
        {
            "text_config": MROPE,
            "vision_config": {
                **QWEN,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        *(GRIDS, "mm_token_type_ids", True, "qwen2_5_vl_text"),
    ),
    "llava_next": Case({"vision_config": CLIP, **PINPOINTS}, TILED, token="image_token_index", text_type="mistral"),
    "llava_onevision": Case(
        {"vision_config": SIGLIP, **PINPOINTS}, TILED, token="image_token_index", text_type="qwen2"
    ),
    "qwen3_vl": Case(
        {
            "text_config": {**MROPE, "head_dim": 16},
            "vision_config": {**PLACED, "deepstack_visual_indexes": [0, 1]},
        },
        *(GRIDS, "mm_token_type_ids", True, "qwen3_vl_text"),
    ),
    "qwen3_vl_moe": Case(
        {
            "text_config": {**MROPE, **EXPERTS, "head_dim": 16, "mlp_only_layers": [1]},
            "vision_config": {**PLACED, "deepstack_visual_indexes": [0, 1]},
        },
        *(GRIDS, "mm_token_type_ids", True, "qwen3_vl_moe_text"),
    ),
    "glm4v": Case(
        {"text_config": HALF_MROPE, "vision_config": {**QWEN, **GLM, "image_size": 32}},
        *(GRIDS, "mm_token_type_ids", True, "glm4v_text"),
    ),
    "glm4v_moe": Case(
        {
            "text_config": {**HALF_MROPE, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "vision_config": {**QWEN, **GLM, "image_size": 32},
        },
        *(GRIDS, "mm_token_type_ids", True, "glm4v_moe_text"),
    ),
    "glm_ocr": Case(
        {"text_config": {**HALF_MROPE, "head_dim": 16}, "vision_config": {**QWEN, **GLM}},
        *(GRIDS, "mm_token_type_ids", True, "glm_ocr_text"),
    ),
    "paddleocr_vl": Case(
        {
            "text_config": {**MROPE, "head_dim": 16, "use_bias": True},
            "vision_config": {**CLIP, "model_type": "paddleocr_vl_vision"},
        },
        [
            Image({"pixel_values": pixels(24, 3, 4, 4, seed=1), "image_grid_thw": torch.tensor([[1, 4, 6]])}),
            Image({"pixel_values": pixels(32, 3, 4, 4, seed=2), "image_grid_thw": torch.tensor([[1, 8, 4]])}),
        ],
        *("mm_token_type_ids", True, "paddleocr_vl_text"),
    ),
    "qwen2_audio": Case({"audio_config": HEARING}, [sound(40, seed=1), sound(23, seed=2)], text_type="qwen2"),
    "qwen3_5": Case(
        {
            "text_config": {
                "head_dim": 16,
                "rope_parameters": {
                    **MROPE["rope_parameters"],
                    "mrope_section": [2, 1, 1],
                    "partial_rotary_factor": 0.5,
                },
                "layer_types": ["linear_attention", "full_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 12,
            },
            "vision_config": PLACED,
        },
        *(GRIDS, "mm_token_type_ids", True, "qwen3_5_text"),
    ),
    "gemma3": Case(
        {
            "text_config": {"head_dim": 16, **WINDOWS},
            "vision_config": {**SIGLIP, "image_size": 32},
            "mm_tokens_per_image": 16,
        },
        [Image({"pixel_values": pixels(1, 3, 32, 32, seed=seed)}) for seed in (1, 2)],
        *("token_type_ids", False, "gemma3_text", "image_token_index"),
    ),
    "gemma4": Case(
        {"text_config": GEMMA4, "vision_config": POOLED, "audio_config": None},
        *([pooled(6, 3, seed=1), pooled(3, 9, seed=2)], "mm_token_type_ids", False, "gemma4_text"),
    ),
    "gemma4-both-ways": Case(
        {
            "text_config": {**GEMMA4, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
            "vision_config": {**POOLED, "standardize": True},
            "audio_config": None,
        },
        *([pooled(6, 6, seed=1), pooled(3, 9, seed=2)], "mm_token_type_ids", False, "gemma4_text"),
    ),
    "gemma4-sound": Case(
        {
            "text_config": GEMMA4,
            "vision_config": POOLED,
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [128, 4],
                "attention_chunk_size": 4,
                "attention_context_left": 5,
                "output_proj_dims": 24,
            },
        },
        *([spectrum(48, seed=1), spectrum(29, seed=2)], "mm_token_type_ids", False, "gemma4_text"),
    ),
    "idefics3": Case({"vision_config": {**CLIP, "model_type": "idefics3_vision"}}, CROPS),
    "smolvlm": Case({"vision_config": {**CLIP, "model_type": "smolvlm_vision"}}, CROPS),
    "internvl": Case(
        {"vision_config": {**CLIP, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]}},
        [Image({"pixel_values": pixels(count, 3, 16, 16, seed=count)}) for count in (1, 3)],
        text_type="qwen2",
    ),
    "mistral3": Case(
        {
            "text_config": {"head_dim": 16, "sliding_window": None},
            "vision_config": {**CLIP, "model_type": "pixtral", "head_dim": 16, "image_size": 32},
        },
        [
            Image({"pixel_values": pixels(1, 3, *size, seed=1), "image_sizes": torch.tensor([size])})
            for size in ((16, 24), (24, 16))
        ],
        text_type="mistral",
        token="image_token_index",
    ),
}
OCR2 = {
    "sam_config": {
        **CLIP,
        "model_type": "deepseek_ocr2_sam_vision_model",
        "image_size": 32,
        "output_channels": 8,
        "downsample_channels": [8, 32],
        "window_size": 3,
        "global_attn_indexes": [1],
    },
    "encoder_config": {**CLIP, "model_type": "deepseek_ocr2_encoder", "num_key_value_heads": 2},
}
CASES["deepseek_ocr2"] = Case(
    {
        "text_config": {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "max_position_embeddings": 1024,
        },
        "vision_config": OCR2,
    },
    [
        Image({"pixel_values": pixels(1, 3, 32, 32, seed=1), "num_local_patches": torch.tensor([0])}),
        Image(
            {
                "pixel_values": pixels(1, 3, 32, 32, seed=2),
                "num_local_patches": torch.tensor([2]),
                "pixel_values_local": pixels(2, 3, 16, 16, seed=3),
            }
        ),
    ],
    text_type="deepseek_ocr2_text",
)
CASES["minicpmv4_6"] = Case(
    {
        "text_config": CASES["qwen3_5"].fields["text_config"],
        "vision_config": {**CLIP, "model_type": "minicpmv4_6_vision"},
        "insert_layer_id": 0,
    },
    [
        Image({"pixel_values": pixels(1, 3, 4, 4 * count, seed=count), "target_sizes": torch.tensor(sizes)})
        for count, sizes in ((32, [[4, 8]]), (96, [[4, 8], [8, 4], [8, 4]]))
    ],
    text_type="qwen3_5_text",
)
CASES["qwen3_5_moe"] = replace(
    CASES["qwen3_5"],
    fields={
        **CASES["qwen3_5"].fields,
        "text_config": {
            **CASES["qwen3_5"].fields["text_config"],
            **EXPERTS,
            "shared_expert_intermediate_size": 24,
        },
    },
    text_type="qwen3_5_moe_text",
)


CASES["kimi_k25"] = Case(
    {
        "text_config": {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
        "vision_config": {
            **CLIP,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
        },
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    },
    [
        Image({"pixel_values": pixels(h * w, 3, 4, 4, seed=h), "image_grid_thw": torch.tensor([[1, h, w]])})
        for h, w in ((4, 6), (8, 4))
    ],
    text_type="deepseek_v3",
)


INTERPRETED = ("qwen2_vl", "gemma3", "qwen3_vl", "kimi_k25")  # that the CUDA executor is tried with, without a GPU


@dataclass
class Model:
    folder: Path
    theirs: Any
    case: Case

    def prompt(self, text: list[int], images: list[Image]) -> tuple[list[int], list[list[tuple[int, int]]]]:
        """A text with images behind its third token, and where they stand."""
        ids, spans = text[:3], []
        for number, image in enumerate(images):
            own, part = [], self.rows(image) // image.parts
            for _ in range(image.parts):
                own.append((len(ids), part))
                ids = [*ids, *[image.token] * part, 5 + number]
            spans.append(own)
        return [*ids, *text[3:]], spans

    def inputs(self, ids: list[int], images: list[Image]) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        for name in {name: None for image in images for name in image.arrays}:
            arrays = [image.arrays[name] for image in images if name in image.arrays]
            if name.startswith("pixel_values") and "target_sizes" in images[0].arrays:
                given[name] = torch.cat(arrays, dim=-1)
                continue
            widest = np.max([array.shape[1:] for array in arrays], axis=0)
            given[name] = torch.cat([padded(array, widest.tolist()) for array in arrays])
        if self.case.kinds:
            films = torch.tensor([image.token for image in images if image.kind == "video"])
            given[self.case.kinds] = (given["input_ids"] == IMAGE).int()
            given[self.case.kinds][torch.isin(given["input_ids"], films)] = 2
        return given

    @torch.inference_mode()
    def rows(self, image: Image) -> int:
        if image.kind == "audio":
            if "input_features_mask" in image.arrays:
                return int(self.theirs.model.get_audio_features(**image.arrays, return_dict=True).attention_mask.sum())
            lengths = image.arrays["feature_attention_mask"].sum(-1)
            return int(self.theirs.model.audio_tower._get_feat_extract_output_lengths(lengths)[1])
        found = getattr(self.theirs, f"get_{image.kind}_features")(**image.arrays, return_dict=True).pooler_output
        return sum(part.numel() for part in found) // found[0].shape[-1]

    @torch.inference_mode()
    def logits(self, ids: list[int], images: list[Image]) -> torch.Tensor:
        if self.case.positions:
            self.theirs.model.rope_deltas = None
        return self.theirs(**self.inputs(ids, images), use_cache=False).logits[0]

    def continued(self, ids: list[int], images: list[Image]) -> tuple[list[int], torch.Tensor]:
        """The most likely tokens, each of a pass over all that is before it, and their logprobs."""
        tokens, scores = list(ids), []
        for _ in range(NEW):
            logprobs = self.logits(tokens, images)[-1].log_softmax(-1)
            tokens.append(int(logprobs.argmax()))
            scores.append(logprobs.max())
        return tokens[len(ids) :], torch.stack(scores)

    def media(
        self, folder: Path, ids: list[int], spans: list[list[tuple[int, int]]], images: list[Image]
    ) -> tuple[list[int], MediaPrompt]:
        """The prompt as the edge sends it."""
        tokens, items = np.array(ids, dtype=np.int32), []
        for places, image in zip(spans, images, strict=True):
            item = item_of(folder, image.kind, image.arrays, places)
            rows = media_ids(item.digest, item.count)
            for begin, size in places:
                tokens[begin : begin + size], rows = rows[:size], rows[size:]
            items.append(item)
        if not self.case.positions:
            return tokens.tolist(), MediaPrompt(tuple(items))
        inputs = self.inputs(ids, images)
        arrays = {name: value for name, value in inputs.items() if name.endswith("grid_thw")}
        kinds = {"mm_token_type_ids": inputs["mm_token_type_ids"]}
        positions, delta = self.theirs.model.get_rope_index(inputs["input_ids"], **kinds, **arrays)
        packed = positions[:, 0].to(torch.int32).contiguous().numpy().tobytes()
        return tokens.tolist(), MediaPrompt(tuple(items), packed, int(delta))


def padded(array: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    ends = [(0, wide - own) for wide, own in zip(sizes, array.shape[1:], strict=True)]
    return torch.nn.functional.pad(array, [each for pair in ends[::-1] for each in pair])


def item_of(folder: Path, kind: MediaKind, arrays: dict[str, torch.Tensor], spans: list[tuple[int, int]]) -> MediaItem:
    """Writes what an encoder takes to a file."""
    features, content = [], b""
    for name, value in arrays.items():
        array = value.numpy()
        features.append(Feature(name, str(array.dtype), array.shape, len(content)))
        content += array.tobytes()
    digest = hashlib.sha256(content).digest()[:16]
    path = folder / digest.hex()
    path.write_bytes(content)
    return MediaItem(kind, digest, tuple(spans), tuple(features), str(path))


def make(name: str, folder: Path) -> Model:
    case = CASES[name]
    torch.manual_seed(1)
    text_config = {**TEXT, "model_type": case.text_type, **case.fields.get("text_config", {})}
    tokens = {case.token.replace("image", kind): VIDEO for kind in ("audio", "video")}
    fields = {**case.fields, "text_config": text_config, case.token: IMAGE, **tokens}
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **fields)
    kind = transformers.AutoModelForMultimodalLM
    # Transformers 5.17 takes the mask of Gemma 4's eager attention to recordings for its opposite.
    attention = None if name == "gemma4-sound" else "eager"
    theirs = kind.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():  # fresh norms are one and biases zero: make every weight count
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
        theirs.get_output_embeddings().weight[VIDEO : IMAGE + 1] = 0.0  # never the most likely tokens
    theirs.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "kimi_k25":
        as_published(folder / "model.safetensors")
    return Model(folder, theirs, case)


@pytest.fixture(scope="module", params=list(CASES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def text(length: int, seed: int) -> list[int]:
    return torch.randint(10, IMAGE - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(model: Model, **flags: object) -> LocalEngine:
    room = {"context_length": 1024, "max_total_tokens": 3000} if model.case.text_type == "deepseek_ocr2_text" else {}
    sizes = {"max_total_tokens": 1200, "max_running_requests": 4, "cpu_threads": 1, "device": "cpu", **room}
    return LocalEngine(model.folder, new=NEW, dtype="float32", **{**sizes, **flags})


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_are_those_of_transformers(model: Model, tmp_path: Path, device: str) -> None:
    engine, images = engine_of(model, device=device), model.case.images
    cases = [(text(9, 1), images), (text(7, 2), images[::-1]), (text(12, 3), []), (text(8, 4), images[:1])]
    prompts = [model.prompt(words, shown) for words, shown in cases]
    asked = [
        model.media(tmp_path, ids, spans, shown) if shown else (ids, None)
        for (ids, spans), (_, shown) in zip(prompts, cases, strict=True)
    ]
    truth = [model.continued(ids, shown) for (ids, _), (_, shown) in zip(prompts, cases, strict=True)]
    found = engine.ask(*(ids for ids, _ in asked), media=[m for _, m in asked], logprobs=LogprobRequest())
    assert [output for output, _ in found] == [output for output, _ in truth]
    for number, (_, scores) in enumerate(truth):
        torch.testing.assert_close(torch.tensor(engine.out.scores[number]), scores, atol=TOLERANCE, rtol=TOLERANCE)
    figures = engine.scheduler._planner.media.figures
    assert figures["mm_encoded_items_total"] == len(images)
    # The first prompt again, with another end: all of its images come from the cache of prefixes.
    words = [*cases[0][0], 11, 12]
    ids, spans = model.prompt(words, images)
    tokens, media = model.media(tmp_path, ids, spans, images)
    output, cached = engine.ask(tokens, media=[media])[0]
    assert output == model.continued(ids, images)[0]
    # A state is kept where a chunk ended, which may be before an image.
    assert cached >= sum(spans[-1][-1]) or engine.limits.groups[-1].kind == "state"
    assert engine.scheduler._planner.media.figures["mm_encoded_items_total"] == len(images)


def clip(*grid: int, parts: int) -> Image:
    arrays = patches(*grid, seed=7).arrays
    names = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}
    return Image({names[name]: array for name, array in arrays.items()}, parts, "video")


CLIPS = {
    "qwen2_vl": clip(2, 4, 4, parts=1),
    "qwen2_5_vl": Image({**clip(2, 4, 4, parts=1).arrays}, 1, "video"),
    "qwen3_5_moe": clip(2, 4, 4, parts=2),
    "qwen3_5": clip(2, 4, 4, parts=2),
    "qwen3_vl_moe": clip(2, 4, 4, parts=2),
    "qwen3_vl": clip(2, 4, 4, parts=2),  # its frames stand apart, with their times between them
    # Transformers takes no images beside a clip of theirs.
    "glm4v": replace(clip(2, 4, 4, parts=2), like_image=True),
    "glm4v_moe": replace(clip(2, 4, 4, parts=2), like_image=True),
    "minicpmv4_6": Image(
        {"pixel_values_videos": pixels(1, 3, 4, 4 * 64), "target_sizes_videos": torch.tensor([[4, 8], [4, 8]])},
        *(2, "video"),
    ),
    "llava_onevision": Image({"pixel_values_videos": pixels(1, 2, 3, 16, 16)}, 1, "video"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPS)
def test_clips_beside_images_give_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    model, shown = make(name, tmp_path), [CASES[name].images[0], CLIPS[name]]
    shown = shown[CLIPS[name].like_image :]
    ids, spans = model.prompt(text(9, 1), shown)
    tokens, media = model.media(tmp_path, ids, spans, shown)
    output, scores = model.continued(ids, shown)
    engine = engine_of(model)
    assert engine.ask(tokens, media=[media], logprobs=LogprobRequest())[0][0] == output
    torch.testing.assert_close(torch.tensor(engine.out.scores[0]), scores, atol=TOLERANCE, rtol=TOLERANCE)
