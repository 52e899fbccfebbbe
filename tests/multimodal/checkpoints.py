"""Folders of tiny checkpoints: a configuration, a tokenizer, an image processor and, if wanted, weights; and
Transformers' own processor of each."""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
}
QWEN |= {"vision_end_token_id": "<|vision_end|>"}
GLM = {"image_token_id": "<image>", "video_token_id": "<video>"}
GLM |= {"image_start_token_id": "<boi>", "image_end_token_id": "<eoi>"}


class Spec(msgspec.Struct, frozen=True):
    config: str
    processor: str
    image_processor: str
    tokens: dict[str, str]  # of the configuration, by their text
    settings: dict[str, Any] = {}
    vision: dict[str, Any] = {}
    image: dict[str, Any] = {}
    given: dict[str, Any] = {}  # of the processor
    named: dict[str, str] = {}  # tokens that the tokenizer has names for
    place: str = "<image>"


CLIP = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
SQUARE = {"size": {"height": 28, "width": 28}}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
IMAGE = {"image_token_index": "<image>"}
FAKE = "<fake_token_around_image>"
SPECS = {
    "llava": Spec(
        "LlavaConfig",
        "LlavaProcessor",
        "CLIPImageProcessorPil",
        IMAGE,
        vision=CLIP,
        image={"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        given={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Spec(
        "LlavaNextConfig",
        "LlavaNextProcessor",
        "LlavaNextImageProcessorPil",
        IMAGE,
        {"image_grid_pinpoints": PINPOINTS},
        CLIP,
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": Spec(
        "LlavaOnevisionConfig",
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessorPil",
        {**IMAGE, "video_token_index": "<video>"},
        {"image_grid_pinpoints": PINPOINTS},
        SIGLIP,
        {**SQUARE, "image_grid_pinpoints": PINPOINTS},
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
    ),
    "qwen2_vl": Spec(
        "Qwen2VLConfig",
        "Qwen2VLProcessor",
        "Qwen2VLImageProcessorPil",
        QWEN,
        vision={"patch_size": 14, "spatial_merge_size": 2},
        image={"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12},
        place="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen2_5_vl": Spec(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLProcessor",
        "Qwen2VLImageProcessorPil",
        QWEN,
        vision={"patch_size": 14, "spatial_merge_size": 2, "tokens_per_second": 2},
        image={"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12},
        place="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_vl": Spec(
        "Qwen3VLConfig",
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorPil",
        QWEN,
        vision={"patch_size": 16, "spatial_merge_size": 2},
        image={"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 12}},
        place="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_vl_moe": Spec(
        "Qwen3VLMoeConfig",
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorPil",
        QWEN,
        vision={"patch_size": 16, "spatial_merge_size": 2},
        image={"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 12}},
        place="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "glm4v": Spec(
        "Glm4vConfig",
        "Glm4vProcessor",
        "Glm4vImageProcessorPil",
        GLM,
        vision={"patch_size": 14, "spatial_merge_size": 2},
        image={"size": {"shortest_edge": 28 * 28, "longest_edge": 2 * 28 * 28 * 12}},
        named={"image_token": "<image>", "video_token": "<video>"},
        place="<boi><image><eoi>",
    ),
    "glm_ocr": Spec(
        "GlmOcrConfig",
        "Glm46VProcessor",
        "Glm46VImageProcessorPil",
        GLM,
        vision={"patch_size": 14, "spatial_merge_size": 2},
        image={"size": {"shortest_edge": 28 * 28, "longest_edge": 2 * 28 * 28 * 12}},
        named={"image_token": "<image>", "video_token": "<video>"},
        place="<boi><image><eoi>",
    ),
    "paddleocr_vl": Spec(
        "PaddleOCRVLConfig",
        "PaddleOCRVLProcessor",
        "PaddleOCRVLImageProcessorPil",
        {**QWEN, "image_token_id": "<image>"},
        vision={"image_size": 28, "patch_size": 14, "spatial_merge_size": 2},
        image={"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}},
        named={"image_token": "<image>"},
        place="<|vision_start|><image><|vision_end|>",
    ),
    "qwen3_5": Spec(
        "Qwen3_5Config",
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorPil",
        QWEN,
        vision={"patch_size": 16, "spatial_merge_size": 2},
        image={"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 12}},
        place="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "gemma3": Spec(
        "Gemma3Config",
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        {"image_token_index": "<soft>", "boi_token_index": "<boi>", "eoi_token_index": "<eoi>"},
        {"mm_tokens_per_image": 4},
        SIGLIP,
        SQUARE,
        {"image_seq_length": 4},
        {"image_token": "<soft>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
        "<boi>",
    ),
    "gemma4": Spec(
        "Gemma4Config",
        "Gemma4Processor",
        "Gemma4ImageProcessorPil",
        {
            "image_token_id": "<soft>",
            "boi_token_id": "<boi>",
            "eoi_token_id": "<eoi>",
            "audio_token_id": "<|AUDIO|>",
            "boa_token_id": "<|audio_bos|>",
            "eoa_token_index": "<|audio_eos|>",
        },
        {
            "audio_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "output_proj_dims": 16,
                "subsampling_conv_channels": (128, 4),
                "attention_chunk_size": 4,
                "attention_context_left": 5,
            }
        },
        {"patch_size": 4, "pooling_kernel_size": 3, "head_dim": 8, "num_key_value_heads": 2},
        {"patch_size": 4, "max_soft_tokens": 70},
        named={
            "image_token": "<soft>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "audio_token": "<|AUDIO|>",
            "boa_token": "<|audio_bos|>",
            "eoa_token": "<|audio_eos|>",
        },
        place="<soft>",
    ),
    "idefics3": Spec(
        "Idefics3Config",
        "Idefics3Processor",
        "Idefics3ImageProcessorPil",
        {"image_token_id": "<image>"},
        {"scale_factor": 1},
        {"image_size": 28, "patch_size": 14},
        {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}},
        {"image_seq_len": 4},
    ),
    "smolvlm": Spec(
        "SmolVLMConfig",
        "SmolVLMProcessor",
        "SmolVLMImageProcessorPil",
        {"image_token_id": "<image>"},
        {"scale_factor": 1},
        {"image_size": 28, "patch_size": 14},
        {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}},
        {"image_seq_len": 4},
    ),
    "internvl": Spec(
        "InternVLConfig",
        "InternVLProcessor",
        "GotOcr2ImageProcessorPil",
        {"image_token_id": "<IMG_CONTEXT>"},
        {"downsample_ratio": 0.5},
        {"image_size": [28, 28], "patch_size": [14, 14]},
        {**SQUARE, "min_patches": 1, "max_patches": 6},
        {"image_seq_length": 1},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>",
    ),
    "mistral3": Spec(
        "Mistral3Config",
        "PixtralProcessor",
        "PixtralImageProcessorPil",
        {"image_token_index": "[IMG]"},
        {"spatial_merge_size": 2},
        {"model_type": "pixtral", "image_size": 112, "patch_size": 14},
        {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 2},
        place="[IMG]",
    ),
}
SPECS["glm4v_moe"] = msgspec.structs.replace(SPECS["glm4v"], config="Glm4vMoeConfig")
SPECS["minicpmv4_6"] = Spec(
    "MiniCPMV4_6Config",
    "MiniCPMV4_6Processor",
    "MiniCPMV4_6ImageProcessorPil",
    {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    {"insert_layer_id": 0},
    {"image_size": 56, "patch_size": 7, "num_hidden_layers": 2},
    {"patch_size": 7, "scale_resolution": 56, "max_slice_nums": 4},
    named={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
    place="<|image_pad|>",
)
OCR2 = {
    "sam_config": {
        **VISION,
        "image_size": 64,
        "patch_size": 1,
        "output_channels": 8,
        "downsample_channels": [8, 16],
        "global_attn_indexes": [],
    },
    "encoder_config": {**VISION, "num_key_value_heads": 2},
}
SPECS["deepseek_ocr2"] = Spec(
    "DeepseekOcr2Config",
    "DeepseekOcr2Processor",
    "DeepseekOcr2ImageProcessorPil",
    {"image_token_id": "<image>"},
    vision=OCR2,
    image={"size": {"height": 64, "width": 64}, "tile_size": 48},
    given={"patch_size": 1, "downsample_ratio": 4},
)
SPECS["kimi_k25"] = Spec(
    "Kimi_K25Config",
    "Kimi_K25Processor",
    "Kimi_K25ImageProcessor",
    {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    {"projection_hidden_size": 16, "tie_word_embeddings": False},
    {"pos_emb_height": 8, "pos_emb_width": 8, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}},
    {"size": {"max_height": 4, "max_width": 4}},
    named={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    place="<|vision_start|><|image_pad|><|vision_end|>",
)
SPECS["qwen3_5_moe"] = msgspec.structs.replace(SPECS["qwen3_5"], config="Qwen3_5MoeConfig")
SPECIAL = 94  # the first token that is no printable character of ASCII
WORDS = [
    *QWEN.values(), "<image>", "<video>", "<soft>", "<boi>", "<eoi>", FAKE, "<global-img>", "<end_of_utterance>",
    "<img>", "</img>", "<IMG_CONTEXT>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>",
    "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
]  # fmt: skip


def write_tokenizer(folder: Path, named: dict[str, str] | None = None) -> transformers.PreTrainedTokenizerFast:
    """Bytes are tokens, and so are up to four line breaks together, as Gemma has them."""
    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(word, special=True, normalized=False) for word in WORDS])
    backend.add_tokens([tokenizers.AddedToken("\n" * n, normalized=False) for n in (4, 3, 2)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=named or {})
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_checkpoint(
    folder: Path,
    family: str,
    *,
    processor_config: bool = True,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Any:
    """Transformers' processor of the checkpoint in the folder. `text` and `vision` are fields of its configurations."""
    spec = SPECS[family]
    tokenizer = write_tokenizer(folder, spec.named)
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in spec.tokens.items()}
    given = {"vision_config": {**VISION, **spec.vision, **(vision or {})}, **({"text_config": text} if text else {})}
    config = getattr(transformers, spec.config)(**given, **ids, **spec.settings)
    config.save_pretrained(folder)
    if family == "kimi_k25":
        image_processor: Any = KimiImages(**spec.image)
        (folder / "preprocessor_config.json").write_text(json.dumps(spec.image))
    else:
        image_processor = getattr(transformers, spec.image_processor)(**spec.image)
        image_processor.save_pretrained(folder)
    if processor_config:
        (folder / "processor_config.json").write_text(json.dumps(spec.given))
    tokenizer.pad_token = "<end_of_utterance>"  # Gemma 4 pads a single text as well
    cls = processor_class(spec.processor)
    cls.check_argument_for_proper_class = lambda self, name, argument: None  # there is no torchvision for video
    unused = {
        name: None for name in ("video_processor", "feature_extractor") if name in cls.__init__.__code__.co_varnames
    }
    if family == "minicpmv4_6":
        unused["video_processor"] = SimpleNamespace(slice_mode=False, downsample_mode="16x")
    return cls(image_processor=image_processor, tokenizer=tokenizer, **unused, **spec.given)


class KimiImages:
    """Transformers' image processor of Kimi K2.5, with Pillow and torch for the functions that torchvision has."""

    model_input_names = ("pixel_values", "image_grid_thw")
    merge_size = 2

    def __init__(self, size: dict[str, int]) -> None:
        path = "torchvision.transforms.v2"
        stubs = {name: ModuleType(name) for name in ("torchvision", "torchvision.transforms", path)}
        stubs[path].functional = None  # type: ignore[attr-defined]
        sys.modules.update(stubs)
        module = importlib.import_module("transformers.models.kimi_k25.image_processing_kimi_k25")
        for name in stubs:  # nobody else is to think that it is there
            del sys.modules[name]
        self._theirs, self._size = module.Kimi_K25ImageProcessor, transformers.image_utils.SizeDict(**size)
        self.patchify = partial(self._theirs.patchify, self)

    def __call__(self, images: Any, **_: Any) -> Any:
        options = {
            "do_resize": True,
            "size": self._size,
            "resample": None,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self._theirs.image_mean,
            "image_std": self._theirs.image_std,
            "patch_size": self._theirs.patch_size,
            "merge_size": self._theirs.merge_size,
            "max_patches": self._theirs.max_patches,
            "disable_grouping": None,
            "return_tensors": "np",
        }
        given = [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in images]
        return self._theirs._preprocess(self, given, **options)

    def fetch_images(self, images: Any) -> Any:
        return images

    def resize(self, images: torch.Tensor, size: Any, resample: None) -> torch.Tensor:
        pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        resized = [picture.resize((size.width, size.height), Image.Resampling.BICUBIC) for picture in pictures]
        return torch.from_numpy(np.stack([np.array(picture) for picture in resized])).permute(0, 3, 1, 2)

    def pad(self, images: torch.Tensor, pad_size: Any) -> torch.Tensor:
        height, width = images.shape[-2:]
        return torch.nn.functional.pad(images, (0, pad_size.width - width, 0, pad_size.height - height))

    def rescale_and_normalize(
        self, images: torch.Tensor, do_rescale: bool, factor: float, do_normalize: bool, mean: Any, std: Any
    ) -> torch.Tensor:
        middle, width = (torch.tensor(each).view(3, 1, 1) * (1.0 / factor) for each in (mean, std))
        return (images.float() - middle) / width


def processor_class(name: str) -> Any:
    """Some classes ask for packages at their import that they need for video alone."""
    if name == "SmolVLMProcessor":
        module = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
        module.num2words = module.num2words or str
    if name == "PixtralProcessor":
        path = "transformers.models.pixtral.image_processing_pixtral"
        stub = ModuleType(path)
        stub.get_resize_output_image_size = None  # type: ignore[attr-defined]
        sys.modules.setdefault(path, stub)
        return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    return getattr(transformers, name)


TEXT = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
HALF_MROPE = {"rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN_VISION = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 48}
QWEN_VISION |= {"num_position_embeddings": 64}
LANGUAGE: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "mistral"},
    "llava_onevision": {"model_type": "qwen2"},
    "qwen2_vl": {"model_type": "qwen2_vl_text", **MROPE},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text", **MROPE},
    "qwen3_vl": {"model_type": "qwen3_vl_text", "head_dim": 16, **MROPE},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe_text", "head_dim": 16, **MROPE, **EXPERTS},
    "glm4v": {"model_type": "glm4v_text", **HALF_MROPE},
    "glm4v_moe": {
        "model_type": "glm4v_moe_text",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        **HALF_MROPE,
    },
    "glm_ocr": {"model_type": "glm_ocr_text", "head_dim": 16, **HALF_MROPE},
    "paddleocr_vl": {"model_type": "paddleocr_vl_text", "head_dim": 16, **MROPE},
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16},
    "gemma4": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 384,
        "hidden_size_per_layer_input": 12,
        "use_bidirectional_attention": "vision",
    },
    "idefics3": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "mistral3": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
}
LANGUAGE["qwen3_5_moe"] = {
    **LANGUAGE["qwen3_5"],
    **EXPERTS,
    "model_type": "qwen3_5_moe_text",
    "shared_expert_intermediate_size": 24,
}
LANGUAGE["deepseek_ocr2"] = {
    "model_type": "deepseek_ocr2_text",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_layer_types": ["dense", "sparse"],
}
LANGUAGE["kimi_k25"] = {
    "model_type": "deepseek_v3",
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
}
LANGUAGE["minicpmv4_6"] = LANGUAGE["qwen3_5"]
SEEING: dict[str, dict[str, Any]] = {  # what an encoder with weights needs beside what `SPECS` has
    "qwen2_vl": {"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 64},
    "qwen2_5_vl": {**QWEN_VISION, "hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**QWEN_VISION, "hidden_size": 32, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {**QWEN_VISION, "hidden_size": 32, "deepstack_visual_indexes": [0]},
    "qwen3_5": {**QWEN_VISION, "hidden_size": 32},
    "qwen3_5_moe": {**QWEN_VISION, "hidden_size": 32},
    "glm4v": {**QWEN_VISION, "hidden_size": 32},
    "glm4v_moe": {**QWEN_VISION, "hidden_size": 32},
    "glm_ocr": {**QWEN_VISION, "hidden_size": 32},
}


HEARING = ("qwen2_audio",)


def write_hearing(folder: Path) -> Any:
    """Transformers' processor of a Qwen2-Audio checkpoint in the folder."""
    tokenizer = write_tokenizer(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16)
    extractor.save_pretrained(folder)
    audio = {"num_mel_bins": 16, "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2}
    number = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    text = {**TEXT, "model_type": "qwen2", "max_position_embeddings": 2048}
    config = transformers.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=number)
    config.save_pretrained(folder)
    return transformers.Qwen2AudioProcessor(feature_extractor=extractor, tokenizer=tokenizer)


def write_model(folder: Path, family: str) -> tuple[Any, Any]:
    """Transformers' processor and model of a whole checkpoint with random weights."""
    torch.manual_seed(1)
    if family in HEARING:
        processor = write_hearing(folder)
    else:
        processor = write_checkpoint(folder, family, text={**TEXT, **LANGUAGE[family]}, vision=SEEING.get(family, {}))
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.AutoModelForMultimodalLM
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():  # fresh norms are one and biases zero: make every weight count
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
        model.get_output_embeddings().weight[SPECIAL:] = 0.0  # every token of an answer is its text
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    model.save_pretrained(folder)
    if family == "kimi_k25":
        as_published(folder / "model.safetensors")
    return processor, model


def as_moonshot(folder: Path) -> None:
    """Has Kimi's settings in the form of Moonshot's own files."""
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    tower = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    published = {
        **{f"vt_{name}": vision[name] for name in tower},
        **{f"init_pos_emb_{side}": vision[f"pos_emb_{side}"] for side in ("height", "width", "time")},
        **{name: vision[name] for name in ("patch_size", "merge_kernel_size")},
        "_attn_implementation": "flash_attention_2",
        "merge_type": "sd2_tpool",
        "mm_hidden_size": vision["hidden_size"],
        "mm_projector_type": "patchmerger",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": config["projection_layer_norm_eps"],
        "video_attn_type": "spatial_temporal",
    }
    text = {**config.get("text_config", {}), "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    given = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "model_type": "kimi_k25",
        "dtype": "float32",
        "media_placeholder_token_id": config["image_token_id"],
        "tie_word_embeddings": False,
        "text_config": text | {"model_type": "kimi_k2"},
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": published,
    }
    (folder / "config.json").write_text(json.dumps(given))
    if (file := folder / "preprocessor_config.json").is_file():
        side = json.loads(file.read_text())["size"]["max_height"]
        media = {"in_patch_limit": 16384, "patch_size": 14, "merge_kernel_size": 2, "patch_limit_on_one_side": side}
        media |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "fixed_output_tokens": None, "sample_fps": 2.0}
        map_ = {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"}
        file.write_text(json.dumps({"auto_map": map_, "media_proc_cfg": media}))


PUBLISHED = {
    "model.blocks.": "model.layers.",
    "encoder.patch_embed.": "patch_embed.",
    "model.mm_projector.": "mm_projector.",
}


def as_published(file: Path) -> None:
    """Transformers writes some of Kimi's tensors by other names than Moonshot: it undoes its own renaming wrongly."""
    tensors = load_file(file)
    for theirs, published in PUBLISHED.items():
        tensors = {name.replace(theirs, published): value for name, value in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
