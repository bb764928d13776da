"""Architectures: models of `transformers` with the widths of real ones, few layers and no weights worth the name.

Each entry gives a model and what it is called with. They are built on whatever device and in whatever dtype are the
default where `build` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LAYERS = 2


@dataclass(frozen=True)
class Architecture:
    """A model that can be built. build: returns the model and the keyword arguments that it is called with."""

    name: str
    build: Callable[[], tuple[torch.nn.Module, dict[str, Any]]]


def _decoder(kind: str, batch: int = 1, tokens: int = 512, **widths: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    """A model for causal language modelling, of a `<kind>Config` (Gemma 3's is a `TextConfig`)."""

    def build() -> tuple[torch.nn.Module, dict[str, Any]]:
        import transformers

        config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
        config = config_class(**widths, use_cache=False)
        model = transformers.AutoModelForCausalLM.from_config(config)
        return model, {"input_ids": _tokens(batch, tokens, config.vocab_size)}

    return build


def _bert() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=LAYERS)
    return BertModel(config, add_pooling_layer=False), {"input_ids": _tokens(8, 256, config.vocab_size)}


def _t5() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_ff=2816,
        d_kv=64,
        num_heads=16,
        num_layers=LAYERS,
        feed_forward_proj="gated-gelu",
        use_cache=False,
    )
    inputs = _tokens(4, 256, config.vocab_size)
    return T5ForConditionalGeneration(config), {"input_ids": inputs, "decoder_input_ids": inputs[:, :64].contiguous()}


def _vit() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(num_hidden_layers=LAYERS)), {"pixel_values": torch.randn(16, 3, 224, 224)}


def _whisper() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        d_model=1280,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        num_mel_bins=128,
        use_cache=False,
    )
    arguments = {"input_features": torch.randn(1, 128, 3000), "decoder_input_ids": _tokens(1, 128, config.vocab_size)}
    return WhisperModel(config), arguments


def _tokens(batch: int, count: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, count))


_EIGHT_BILLION = {
    "hidden_size": 4096,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_GEMMA = {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4}
_PHI = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32}

ARCHITECTURES = (
    Architecture("Llama 3 8B", _decoder("Llama", **_EIGHT_BILLION, intermediate_size=14336, vocab_size=128256)),
    Architecture(
        "Qwen 3 8B", _decoder("Qwen3", **_EIGHT_BILLION, intermediate_size=12288, head_dim=128, vocab_size=151936)
    ),
    Architecture(
        "Mistral 7B",
        _decoder("Mistral", **_EIGHT_BILLION, intermediate_size=14336, vocab_size=32768, sliding_window=None),
    ),
    Architecture("Gemma 3 4B", _decoder("Gemma3", **_GEMMA, num_hidden_layers=LAYERS, head_dim=256, vocab_size=262208)),
    Architecture("GPT-2", _decoder("GPT2", batch=4, n_layer=LAYERS, vocab_size=50304)),
    Architecture("BERT", _bert),
    Architecture("T5 1.1 large", _t5),
    Architecture("ViT", _vit),
    Architecture("Whisper large", _whisper),
    Architecture("Phi-3 mini", _decoder("Phi3", **_PHI, num_hidden_layers=LAYERS, vocab_size=32064, pad_token_id=0)),
)
