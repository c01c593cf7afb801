"""The table of model types: which can be patched, and which are known and cannot, with the reason.

Classes are named, not imported, so that no modelling file of transformers is read for the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LearnedPositions:
    """Where a model type keeps its absolute positions, for `extend_positions`.

    Args:
        embeddings (`str`): path, from the model without its head, of the module that holds the table and its buffers.
        table (`str`): name of the `nn.Embedding` in that module.
        reserved_by_padding (`bool`): whether positions begin after `padding_idx` (RoBERTa: 2 rows more than tokens).
        buffers (`tuple[str, ...]`): buffers of that module with one column per row of the table.
    """

    embeddings: str = "embeddings"
    table: str = "position_embeddings"
    reserved_by_padding: bool = False
    buffers: tuple[str, ...] = ("position_ids", "token_type_ids")


@dataclass(frozen=True)
class OtherPositions:
    """Positions that `extend_positions` cannot, or need not, extend.

    Args:
        kind (`str`): "rotary", "learned", "fixed" (a formula), "relative" or "convolution".
        why (`str`): why there is nothing to do, and what to do instead.
        any_size (`bool`): whether an image may have more patches than the config names.
    """

    kind: str
    why: str
    any_size: bool = False


def _layer_of_its_place(config: Any, place: int) -> tuple[int, ...]:
    return (place,)


def _albert_layers(config: Any, place: int) -> tuple[int, ...]:
    """ALBERT's groups of layers share their modules: each module serves every layer of its group."""
    layers_per_group = config.num_hidden_layers / config.num_hidden_groups
    return tuple(layer for layer in range(config.num_hidden_layers) if int(layer / layers_per_group) == place)


def _square_window(config: Any) -> int:
    """The patches of Qwen2.5-VL's windows, whose side the config tells in pixels."""
    return int((config.window_size // config.patch_size) ** 2)


@dataclass(frozen=True)
class ModelType:
    """How to recognise the self-attention of one model type, and what a reader of the table is told.

    Args:
        attention (`tuple[str, ...]`): class names of the modules that call the attention function for self-attention;
            those that wrapped them in older versions of transformers have other names, or do not say `is_causal`.
        positions (`LearnedPositions` or `OtherPositions`): what it knows of places.
        reads (`str`): what goes in.
        longest (`str`): how long inputs get, for a reader.
        has_decoder (`bool`): whether a decoder uses the same classes beside the encoder; it stays exact.
        causal (`bool`): whether it is a decoder alone, whose attention masks the future.
        bidirectional_config_name (`str`): the field of its config that makes it see the future, too, beside
            transformers' `is_causal=False`.
        window_in_config (`bool`): whether all its layers see the window only that the config names.
        exact_kind (`str`): which of `exact.kinds.KINDS` it is, if any: "windows" or "biases" of distances in a forward
            of its own, "images" that are read as one sequence.
        window_of_image (`Callable`, *optional*): where layers call attention for each window of an image, the patches
            of one, given the config: what has no more is exact.
        special_patches (`int`): of an image, the tokens beside its patches, such as [CLS].
        layers (`Callable`): the layers that a module serves, given the config and its place in the list of layers.
    """

    attention: tuple[str, ...]
    positions: LearnedPositions | OtherPositions
    reads: str = "text"
    longest: str = ""
    has_decoder: bool = False
    causal: bool = False
    bidirectional_config_name: str = ""
    window_in_config: bool = False
    exact_kind: str = ""
    window_of_image: Callable[[Any], int] | None = None
    special_patches: int = 1
    layers: Callable[[Any, int], tuple[int, ...]] = _layer_of_its_place

    @property
    def has_own_forward(self) -> bool:
        """Whether its attention calls no function of transformers: a patch gives it another class."""
        return self.exact_kind in ("windows", "biases")

    @property
    def learned(self) -> LearnedPositions | None:
        """The table that `extend_positions` makes longer; None where it has none."""
        return self.positions if isinstance(self.positions, LearnedPositions) else None


_BERT = LearnedPositions()
_ROBERTA = LearnedPositions(reserved_by_padding=True)
_GPT2 = LearnedPositions(embeddings="", table="wpe", buffers=())
_ROTARY = OtherPositions(
    "rotary", "its positions are rotary, computed for any length; see config.rope_parameters to scale them"
)
_MODERNBERT = OtherPositions(
    "rotary",
    "its positions are rotary, computed for any length; raise config.max_position_embeddings if a tokenizer or "
    "pipeline stops you",
)
_ESM = OtherPositions(
    "rotary",
    'ESM-2 has rotary positions, computed for any length; ESM-1b (config.position_embedding_type="absolute") has a '
    "table that reaches as far as it was trained",
)
_IMAGE = OtherPositions(
    "learned",
    "its positions form a grid of image patches; pass interpolate_pos_encoding=True to the model's forward instead",
)
_ANY_IMAGE = OtherPositions("learned", "its positions are resized to every image, of any size", any_size=True)
_FIXED_VIDEO = OtherPositions("fixed", "its positions are computed for the frames and patches that the config names")
_PATCHES = OtherPositions(
    "rotary", "its positions are rotary over image patches, computed for any size of image", any_size=True
)
_VIDEO_PATCHES = OtherPositions(
    "rotary", "its positions are rotary over frames and patches, computed for any size", any_size=True
)
_RESIZED = OtherPositions(
    "learned", "its positions are resized to every image; raise its processor's max_num_patches", any_size=True
)
_SPECTROGRAM = OtherPositions("learned", "its positions form a grid over the spectrogram that the config names")
_CONVOLUTION = OtherPositions(
    "convolution", "its positions come from a convolution, so inputs of any length fit already"
)
_THIRTY_SECONDS = OtherPositions(
    "fixed", "its encoder takes exactly 30 seconds of audio (config.max_source_positions)"
)
_FROM_2 = OtherPositions("learned", "its table of positions counts from 2 and has a class of its own")
_LED = OtherPositions("learned", "its encoder and its decoder have a table of positions each, of a class of their own")
_SINUSOIDS = OtherPositions(
    "fixed", "its positions are sinusoids; build the model with a larger config.max_position_embeddings"
)
_GROWING_SINUSOIDS = OtherPositions("fixed", "its positions are sinusoids, computed for any length")
_DISTANCES = OtherPositions("relative", "its biases are of distances, of any length")
_VECTORS = OtherPositions(
    "relative", "its vectors are of distances, of any length; a table beside them, if it has one, cannot grow"
)

_COMPUTED_VECTORS = OtherPositions("relative", "its vectors are of distances, computed for any length")


def _bert(attention: str, positions: LearnedPositions = _BERT, longest: str = "512", **options: Any) -> ModelType:
    return ModelType((attention,), positions, longest=longest, **options)


def _rotary(attention: str, longest: str, **options: Any) -> ModelType:
    return ModelType((attention,), _ROTARY, longest=longest, **options)


def _image(
    *attention: str, positions: OtherPositions = _IMAGE, longest: str = "197", more: str = "", **options: Any
) -> ModelType:
    return ModelType(attention, positions, reads="image", longest=f"{longest} patches{more}", **options)


def _tower(attention: str, positions: OtherPositions = _PATCHES, more: str = "", **options: Any) -> ModelType:
    """A vision encoder of a model that reads images among its text: each image, or frame, is attended to alone."""
    return ModelType((attention,), positions, reads="image", longest=f"any number of patches{more}", **options)


def _tower_of_windows(attention: str) -> ModelType:
    return _tower(attention, more="; seven layers of eight see windows", window_of_image=_square_window)


def _speech(attention: str) -> ModelType:
    return ModelType((attention,), _CONVOLUTION, reads="sound", longest="any; 50 frames a second")


def _conformer(attention: str, frames: str = "50") -> ModelType:
    longest = f"any; {frames} frames a second"
    return ModelType((attention,), _COMPUTED_VECTORS, reads="sound", longest=longest, exact_kind="biases")


def _decoder(
    attention: str, longest: str, positions: LearnedPositions | OtherPositions = _ROTARY, **options: Any
) -> ModelType:
    return ModelType((attention,), positions, longest=longest, causal=True, **options)


def _t5(attention: str) -> ModelType:
    return ModelType((attention,), _DISTANCES, longest="512, used to any", has_decoder=True, exact_kind="biases")


def _encoder_of_two(attention: str, positions: OtherPositions, longest: str = "1,024") -> ModelType:
    return ModelType((attention,), positions, longest=longest, has_decoder=True)


MODEL_TYPES: dict[str, ModelType] = {
    "bert": _bert("BertSelfAttention"),
    "roberta": _bert("RobertaSelfAttention", _ROBERTA),
    "xlm-roberta": _bert("XLMRobertaSelfAttention", _ROBERTA, "512; bge-m3 and bge-reranker-v2-m3 8,192"),
    "camembert": _bert("CamembertSelfAttention", _ROBERTA),
    "electra": _bert("ElectraSelfAttention"),
    "distilbert": _bert("DistilBertSelfAttention", LearnedPositions(buffers=("position_ids",))),
    "albert": _bert("AlbertAttention", layers=_albert_layers),
    "ernie": _bert("ErnieSelfAttention"),
    "data2vec-text": _bert("Data2VecTextSelfAttention", _ROBERTA),
    "roberta-prelayernorm": _bert("RobertaPreLayerNormSelfAttention", _ROBERTA),
    "xlm-roberta-xl": _bert("XLMRobertaXLSelfAttention", _ROBERTA),
    "xmod": _bert("XmodSelfAttention", _ROBERTA),
    "bert-generation": _bert("BertGenerationSelfAttention", LearnedPositions(buffers=("position_ids",))),
    "mobilebert": _bert("MobileBertSelfAttention"),
    "modernbert": ModelType(
        ("ModernBertAttention",), _MODERNBERT, longest="8,192; two layers of three see windows of 128"
    ),
    "longformer": ModelType(
        ("LongformerSelfAttention",),
        LearnedPositions(reserved_by_padding=True, buffers=()),
        longest="4,096, seen in windows of 512",
        exact_kind="windows",
    ),
    "longt5": ModelType(
        ("LongT5LocalAttention", "LongT5TransientGlobalAttention"),
        _DISTANCES,
        longest="16,384, seen in windows of 255, and as means",
        has_decoder=True,
        exact_kind="windows",
    ),
    "t5": _t5("T5Attention"),
    "mt5": _t5("MT5Attention"),
    "umt5": _t5("UMT5Attention"),
    "mpnet": _bert(
        "MPNetSelfAttention",
        LearnedPositions(reserved_by_padding=True, buffers=("position_ids",)),
        exact_kind="biases",
    ),
    "deberta-v2": ModelType(("DisentangledSelfAttention",), _VECTORS, longest="512, used to any", exact_kind="biases"),
    "gte": _rotary("GteAttention", "8,192"),
    "nomic_bert": _rotary("NomicBertAttention", "2,048, used to 8,192"),
    "jina_embeddings_v3": _rotary("JinaEmbeddingsV3Attention", "8,192"),
    "eurobert": _rotary("EuroBertAttention", "8,192"),
    "ultrabert": _rotary("UltrabertAttention", "32,768; most layers see windows of 128"),
    "embedding_gemma2_text": _rotary("EmbeddingGemma2Attention", "262,144; most layers see windows of 512"),
    "neomme": _rotary("NeoMMEAttention", "16,384; most layers see windows of 256 or 1,024"),
    "openai_privacy_filter": _rotary("OpenAIPrivacyFilterAttention", "131,072, seen in windows of 257"),
    "esm": ModelType(("EsmSelfAttention",), _ESM, reads="protein", longest="1,024 and more"),
    "esmc": _rotary("EsmcAttention", "2,048", reads="protein"),
    "vit": _image("ViTAttention", "ViTSelfAttention"),
    "deit": _image("DeiTAttention", "DeiTSelfAttention", longest="198", special_patches=2),
    "dinov2": _image(
        "Dinov2Attention",
        "Dinov2SelfAttention",
        positions=_ANY_IMAGE,
        longest="1,370",
        more=", any number; also inside depth_anything",
    ),
    "dinov2_with_registers": _image(
        "Dinov2WithRegistersAttention",
        "Dinov2WithRegistersSelfAttention",
        positions=_ANY_IMAGE,
        longest="1,374",
        more=", any number",
    ),
    "dinov3_vit": _image("DINOv3ViTAttention", positions=_PATCHES, longest="201", more=", any number"),
    "vit_mae": _image("ViTMAEAttention", "ViTMAESelfAttention"),
    "ijepa": _image("IJepaAttention", "IJepaSelfAttention", longest="256", special_patches=0),
    "clip_vision_model": _image("CLIPAttention", longest="577"),
    "siglip_vision_model": _image("SiglipAttention", longest="729", special_patches=0),
    "siglip2_vision_model": _image("Siglip2Attention", positions=_RESIZED, longest="256", more=", any number"),
    "pixtral": _tower("PixtralAttention", exact_kind="images"),
    "qwen2_vl_vision": _tower("VisionAttention"),
    "qwen2_5_vl_vision": _tower_of_windows("Qwen2_5_VLVisionAttention"),
    "qwen2_5_omni_vision_encoder": _tower_of_windows("Qwen2_5OmniVisionAttention"),
    "exaone4_5_vision": _tower_of_windows("Exaone4_5_VisionAttention"),
    "qwen3_vl_vision": _tower("Qwen3VLVisionAttention"),
    "qwen3_vl_moe_vision": _tower("Qwen3VLMoeVisionAttention"),
    "qwen3_5_vision": _tower("Qwen3_5VisionAttention"),
    "qwen3_5_moe_vision": _tower("Qwen3_5MoeVisionAttention"),
    "qwen3_omni_moe_vision_encoder": _tower("Qwen3OmniMoeVisionAttention"),
    "qwen4_exp_vision": _tower("Qwen4ExpVisionAttention"),
    "glm4v_vision": _tower("Glm4vVisionAttention"),
    "glm4v_moe_vision": _tower("Glm4vMoeVisionAttention"),
    "glm5_next_vision": _tower("Glm5NextVisionAttention"),
    "glm_ocr_vision": _tower("GlmOcrVisionAttention"),
    "glm_image_vision": _tower("GlmImageVisionAttention", _ANY_IMAGE),
    "ernie4_5_vl_moe_vision": _tower("Ernie4_5_VLMoeVisionAttention"),
    "paddleocr_vl_vision": _tower("PaddleOCRVisionAttention"),
    "kimi_k25_vision": _tower("Kimi_K25VisionAttention"),
    "video_llama_3_vision": _tower("VideoLlama3VisionAttention"),
    "hunyuan_vl_vision": _tower("HunYuanVLVisionAttention", _ANY_IMAGE),
    "minimax_m3_vl_vision": _tower("MiniMaxM3VLVisionAttention"),
    "cosmos3_edge_vision": _tower("Cosmos3EdgeVisionAttention", _ANY_IMAGE),
    "cohere_compass_vision": _tower("CohereCompassVisionAttention"),
    "gemma4_vision": _image("Gemma4VisionAttention", positions=_PATCHES, longest="2,520 to 10,080"),
    "idefics3_vision": _image("Idefics3VisionAttention", positions=_ANY_IMAGE, longest="676"),
    "idefics2_vision": _image("Idefics2VisionAttention", positions=_ANY_IMAGE, longest="4,900"),
    "owlvit_vision_model": _image("OwlViTAttention", longest="577 to 3,601"),
    "owlv2_vision_model": _image("Owlv2Attention", longest="3,601 to 5,185"),
    "smolvlm_vision": _image("SmolVLMVisionAttention", positions=_ANY_IMAGE, longest="1,024"),
    "yolos": _image("YolosSelfAttention", positions=_ANY_IMAGE, longest="4,300", more=", any number"),
    "sam3_vit_model": _image(
        "Sam3ViTRoPEAttention",
        positions=_PATCHES,
        longest="5,184",
        more="; four layers of 32 see whole images",
        window_of_image=lambda config: config.window_size**2,
    ),
    "radio": _image("RadioAttention", positions=_ANY_IMAGE, longest="1,034", more=", any number"),
    "pixio": _image("PixioAttention", "PixioSelfAttention", positions=_ANY_IMAGE, longest="264", more=", any number"),
    "sapiens2": _image("Sapiens2Attention", positions=_PATCHES, longest="3,081", more=", any number"),
    "videomae": ModelType(("VideoMAESelfAttention",), _FIXED_VIDEO, reads="video", longest="1,568 patches"),
    "vivit": ModelType(("VivitAttention", "VivitSelfAttention"), _IMAGE, reads="video", longest="3,137 patches"),
    "vjepa2": ModelType(("VJEPA2RopeAttention",), _VIDEO_PATCHES, reads="video", longest="8,192 patches, any number"),
    "audio-spectrogram-transformer": ModelType(
        ("ASTAttention", "ASTSelfAttention"), _SPECTROGRAM, reads="sound", longest="1,214 patches"
    ),
    "wav2vec2": _speech("Wav2Vec2Attention"),
    "hubert": _speech("HubertAttention"),
    "data2vec-audio": _speech("Data2VecAudioAttention"),
    "unispeech": _speech("UniSpeechAttention"),
    "unispeech-sat": _speech("UniSpeechSatAttention"),
    "parakeet_encoder": _conformer("ParakeetEncoderAttention", "12.5"),
    "wav2vec2-bert": _conformer("Wav2Vec2BertSelfAttention"),
    "wav2vec2-conformer": _conformer("Wav2Vec2ConformerSelfAttention"),
    "whisper": ModelType(
        ("WhisperAttention",), _THIRTY_SECONDS, reads="sound", longest="1,500 frames", has_decoder=True
    ),
    "bart": _encoder_of_two("BartAttention", _FROM_2),
    "mbart": _encoder_of_two("MBartAttention", _FROM_2),
    "pegasus": _encoder_of_two("PegasusAttention", _SINUSOIDS),
    "marian": _encoder_of_two("MarianAttention", _SINUSOIDS, "512"),
    "led": ModelType(
        ("LEDEncoderSelfAttention",),
        _LED,
        longest="16,384, seen in windows of 1,024",
        has_decoder=True,
        exact_kind="windows",
    ),
    "pegasus_x": ModelType(
        ("PegasusXGlobalLocalAttention",),
        _GROWING_SINUSOIDS,
        longest="16,384, seen in blocks of 512, and 128 global tokens",
        has_decoder=True,
        exact_kind="windows",
    ),
    "m2m_100": _encoder_of_two("M2M100Attention", _GROWING_SINUSOIDS),
    "gpt2": _decoder("GPT2Attention", "1,024", _GPT2),
    "opt": _decoder("OPTAttention", "2,048", _FROM_2),
    "gpt_neox": _decoder("GPTNeoXAttention", "2,048"),
    "gpt_bigcode": _decoder("GPTBigCodeAttention", "8,192", _GPT2),
    "llama": _decoder("LlamaAttention", "131,072"),
    "llama4_text": _decoder("Llama4TextAttention", "10,485,760; three layers of four see chunks of 8,192"),
    "mllama_text_model": _decoder("MllamaTextSelfAttention", "131,072, images beside them"),
    "qwen2": _decoder("Qwen2Attention", "32,768"),
    "qwen2_moe": _decoder("Qwen2MoeAttention", "32,768"),
    "qwen3": _decoder("Qwen3Attention", "40,960; Qwen3-Embedding and -Reranker 32,768"),
    "qwen3_moe": _decoder("Qwen3MoeAttention", "262,144"),
    "qwen2_vl_text": _decoder("Qwen2VLAttention", "32,768, images among them"),
    "qwen2_5_vl_text": _decoder("Qwen2_5_VLAttention", "128,000, images among them"),
    "qwen3_vl_text": _decoder("Qwen3VLTextAttention", "262,144, images among them"),
    "qwen3_vl_moe_text": _decoder("Qwen3VLMoeTextAttention", "262,144, images among them"),
    "glm4v_text": _decoder("Glm4vTextAttention", "65,536, images among them"),
    "glm4v_moe_text": _decoder("Glm4vMoeTextAttention", "131,072, images among them"),
    "glm_ocr_text": _decoder("GlmOcrTextAttention", "131,072, images among them"),
    "ernie4_5_vl_moe_text": _decoder("Ernie4_5_VLMoeTextAttention", "131,072, images among them"),
    "paddleocr_vl_text": _decoder("PaddleOCRAttention", "131,072, images among them"),
    "mistral": _decoder("MistralAttention", "32,768; version 0.1 sees windows of 4,096", window_in_config=True),
    "mistral4": _decoder("Mistral4Attention", "1,048,576"),
    "mixtral": _decoder("MixtralAttention", "65,536", window_in_config=True),
    "ministral": _decoder("MinistralAttention", "131,072; three layers of four see windows of 32,768"),
    "ministral3": _decoder("Ministral3Attention", "262,144", window_in_config=True),
    "gemma": _decoder("GemmaAttention", "8,192"),
    "gemma2": _decoder("Gemma2Attention", "8,192, exactly; every second layer sees windows of 4,096"),
    "vaultgemma": _decoder("VaultGemmaAttention", "1,024, exactly"),
    "gemma3_text": _decoder(
        "Gemma3Attention",
        "131,072; five layers of six see windows; EmbeddingGemma, an encoder, 2,048",
        bidirectional_config_name="use_bidirectional_attention",
    ),
    "gemma4_text": _decoder("Gemma4TextAttention", "262,144; most layers see windows"),
    "granite": _decoder("GraniteAttention", "131,072"),
    "granitemoe": _decoder("GraniteMoeAttention", "131,072"),
    "olmo": _decoder("OlmoAttention", "4,096"),
    "olmo2": _decoder("Olmo2Attention", "4,096"),
    "olmo3": _decoder("Olmo3Attention", "65,536; three of four see windows of 4,096"),
    "olmoe": _decoder("OlmoeAttention", "4,096"),
    "smollm3": _decoder("SmolLM3Attention", "65,536"),
    "phi": _decoder("PhiAttention", "2,048"),
    "phi3": _decoder("Phi3Attention", "131,072; Phi-3-mini-4k sees windows of 2,047", window_in_config=True),
    "phi4_multimodal": _decoder("Phi4MultimodalAttention", "131,072", window_in_config=True),
    "phimoe": _decoder("PhimoeAttention", "131,072", window_in_config=True),
    "cohere": _decoder("CohereAttention", "131,072"),
    "cohere2": _decoder("Cohere2Attention", "262,144; three layers of four see windows of 4,096"),
    "glm": _decoder("GlmAttention", "131,072"),
    "glm4": _decoder("Glm4Attention", "32,768"),
    "glm4_moe": _decoder("Glm4MoeAttention", "202,752"),
    "ernie4_5": _decoder("Ernie4_5Attention", "131,072"),
    "ernie4_5_moe": _decoder("Ernie4_5_MoeAttention", "131,072"),
    "exaone4": _decoder("Exaone4Attention", "131,072; of 32B, three layers of four see windows of 4,096"),
    "seed_oss": _decoder("SeedOssAttention", "524,288"),
    "hunyuan_v1_dense": _decoder("HunYuanDenseV1Attention", "262,144"),
    "minimax_m2": _decoder("MiniMaxM2Attention", "196,608"),
    "aria_text": _decoder("AriaTextAttention", "65,536, images among them"),
    "emu3_text_model": _decoder("Emu3Attention", "9,216, images among them"),
    "jetmoe": _decoder("JetMoeAttention", "4,096"),
    "biogpt": _decoder("BioGptAttention", "1,024", _FROM_2),
    "apertus": _decoder("ApertusAttention", "65,536"),
    "arcee": _decoder("ArceeAttention", "65,536"),
    "nemotron": _decoder("NemotronAttention", "4,096"),
    "stablelm": _decoder("StableLmAttention", "4,096 to 16,384"),
    "gemma3n_text": _decoder("Gemma3nTextAttention", "32,768; four layers of five see windows of 512"),
    "gemma4_unified_text": _decoder("Gemma4UnifiedTextAttention", "262,144; five layers of six see windows of 1,024"),
    "afmoe": _decoder("AfmoeAttention", "16,384 and more; three layers of four see windows of 1,024"),
    "axk1": _decoder("AXK1Attention", "32,768"),
    "cwm": _decoder("CwmAttention", "131,072; three layers of four see windows of 8,192"),
    "dots1": _decoder("Dots1Attention", "32,768"),
    "exaone_moe": _decoder("ExaoneMoeAttention", "262,144; three layers of four see windows of 128"),
    "flint": _decoder("FlintAttention", "262,144; most layers see windows of 512"),
    "granitemoeshared": _decoder("GraniteMoeSharedAttention", "4,096 and more"),
    "granitemoe_swa": _decoder("GraniteMoeSWAAttention", "2,048 and more; three layers of four see windows of 128"),
    "hunyuan_v1_moe": _decoder("HunYuanMoEV1Attention", "262,144"),
    "hy_v3": _decoder("HYV3Attention", "131,072"),
    "hyperclovax": _decoder("HyperCLOVAXAttention", "131,072"),
    "internlm3": _decoder("LlamaAttention", "32,768"),
    "jais2": _decoder("Jais2Attention", "8,192"),
    "laguna": _decoder("LagunaAttention", "131,072; some layers see windows of 512"),
    "mellum": _decoder("MellumAttention", "131,072; some layers see windows of 1,024"),
    "persimmon": _decoder("PersimmonAttention", "16,384"),
    "solar_open": _decoder("SolarOpenAttention", "131,072"),
    "youtu": _decoder("YoutuAttention", "131,072"),
    "gpt_oss": _decoder("GptOssAttention", "131,072; every second layer sees windows of 128"),
    "granite_swa": _decoder("GraniteSWAAttention", "8,192 and more; some layers see windows"),
    "mimo_v2_flash": _decoder("MiMoV2FlashAttention", "262,144; most layers see windows of 128"),
    "starcoder2": _decoder("Starcoder2Attention", "16,384, seen in windows of 4,096", window_in_config=True),
    "modernbert-decoder": _decoder("ModernBertDecoderAttention", "8,192; two layers of three see windows of 64"),
    "bitnet": _decoder("BitNetAttention", "4,096"),
    "flex_olmo": _decoder("FlexOlmoAttention", "4,096"),
    "nanochat": _decoder("NanoChatAttention", "2,048"),
    "cohere2_moe": _decoder("Cohere2MoeAttention", "8,192 and more; three layers of four see windows of 4,096"),
    "deepseek_v2": _decoder("DeepseekV2Attention", "163,840"),
    "deepseek_v3": _decoder("DeepseekV3Attention", "163,840"),
    "glm4_moe_lite": _decoder("Glm4MoeLiteAttention", "202,752"),
    "minicpm3": _decoder("MiniCPM3Attention", "32,768"),
    "qwen3_next": _decoder("Qwen3NextAttention", "262,144; three layers of four are linear"),
    "qwen3_5_text": _decoder("Qwen3_5Attention", "262,144; three layers of four are linear"),
    "qwen3_5_moe_text": _decoder("Qwen3_5MoeAttention", "262,144; three layers of four are linear"),
    "granitemoehybrid": _decoder("GraniteMoeHybridAttention", "131,072; nine layers of ten are Mamba's"),
    "falcon_h1": _decoder("FalconH1Attention", "262,144, Mamba beside attention"),
    "jamba": _decoder("JambaAttention", "262,144; seven layers of eight are Mamba's"),
    "nemotron_h": _decoder("NemotronHAttention", "131,072 and more; most layers are Mamba's"),
    "bamba": _decoder("BambaAttention", "262,144; most layers are Mamba's"),
    "bailing_hybrid": _decoder("BailingHybridAttention", "262,144; five layers of six are linear"),
    "kimi_linear": _decoder("KimiLinearAttention", "1,048,576; three layers of four are linear"),
    "olmo_hybrid": _decoder("OlmoHybridAttention", "65,536; three layers of four are linear"),
    "lfm3": _decoder("Lfm3Attention", "128,000; most layers are convolutions or see windows"),
    "lfm2": _decoder("Lfm2Attention", "128,000; most layers are convolutions"),
    "lfm2_moe": _decoder("Lfm2MoeAttention", "128,000; most layers are convolutions"),
}

_NO_DISPATCH = "computes its attention itself, without transformers' AttentionInterface"
_GRID = "adds a bias for the position in the image to every score, within small windows"
_WITHOUT_SDPA = "does not support SDPA in transformers, which runs what no method serves"
_OWN_MASK = "makes a mask of its own for the scores, which no method reads"
_CAUSAL_TEXT = "hides the future by a keyword, in texts of at most 77 tokens, which are too short to gain anything"
_SHORT_TEXT = "reads at most 64 tokens, too few to gain anything"
_TRAINED_WITH_IT = "is trained from scratch with an efficient attention of its own: there is no exact one to replace"
_LITTLE_GAIN = "takes 512 tokens, at which exact attention without matrices of distances was 1.0 to 1.2 times as fast"
_OWN_SPARSE = "has a sparse attention of its own, and " + _NO_DISPATCH

# Model types that are asked for and not served, and why: what follows "its model".
NOT_SERVED: dict[str, str] = {
    "layoutlm": _OWN_MASK,
    "markuplm": _WITHOUT_SDPA,
    "splinter": _WITHOUT_SDPA,
    "big_bird": _OWN_SPARSE,
    "deberta": _LITTLE_GAIN,
    "clip_text_model": _CAUSAL_TEXT,
    "siglip_text_model": _SHORT_TEXT,
    "siglip2_text_model": _SHORT_TEXT,
    "swin": _GRID,
    "beit": _GRID,
    "sam": _GRID,
    "seamless_m4t_v2": "adds the product of the query and a distance vector to every score, in code of its own",
    "falcon": _NO_DISPATCH,
    "bloom": _NO_DISPATCH,
    "mpt": _NO_DISPATCH,
    "gptj": _NO_DISPATCH,
    "gpt_neo": _NO_DISPATCH,
    "codegen": _NO_DISPATCH,
    "cst": _TRAINED_WITH_IT,
    "clusterformer": _TRAINED_WITH_IT,
}

# For messages.
WHAT_IS_SERVED = f"`effattn models` lists the {len(MODEL_TYPES)} model types that are served"
DECODERS = f"the {sum(entry.causal for entry in MODEL_TYPES.values())} types of decoders that `effattn models` lists"

SERVED_HEADER = ("model type", "what is patched", "reads", "positions", "longest input as published")
NOT_SERVED_HEADER = ("model type", "not served, because it")


def served_rows() -> list[tuple[str, ...]]:
    """The model types that can be patched, a row for each, for a reader."""
    return [
        (
            name,
            "decoder" if entry.causal else "encoder, its decoder exact" if entry.has_decoder else "encoder",
            entry.reads,
            "learned, extendable" if isinstance(entry.positions, LearnedPositions) else entry.positions.kind,
            entry.longest,
        )
        for name, entry in MODEL_TYPES.items()
    ]


def not_served_rows() -> list[tuple[str, str]]:
    """The reasons why known model types cannot be patched, and those types, for a reader."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in NOT_SERVED.items():
        by_reason.setdefault(reason, []).append(name)
    return [(", ".join(names), reason) for reason, names in by_reason.items()]
