"""A small random Llama as a GGUF file, with q and k interleaved the way llama.cpp stores them.

hub   head 0: rows a0 a1 a2 a3 b0 b1 b2 b3     (a, b): the two halves that rotary embedding pairs
GGUF  head 0: rows a0 b0 a1 b1 a2 b2 a3 b3
"""

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS, CONTEXT = 64, 96, 4, 2, 2, 128
VOCAB = 2 + 256 + 1


def hub_attention(layer: int, name: str) -> NDArray[np.float32]:
    """The q, k, v or o matrix of a layer as the hub has it; "q" and "k" are then interleaved in the file."""
    rows = HIDDEN // HEADS * KV_HEADS if name in "kv" else HIDDEN
    rng = np.random.default_rng([layer, ord(name)])
    return (rng.standard_normal((rows, HIDDEN)) / HIDDEN**0.5).astype(np.float32)


def interleave(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    half = matrix.shape[0] // heads // 2
    rows = [head * 2 * half + pair + side * half for head in range(heads) for pair in range(half) for side in (0, 1)]
    return np.ascontiguousarray(matrix[rows])


def add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    """A byte-level one; the first two tokens are special."""
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def write_tiny_gguf(path: Path, architecture: str = "llama", extra_tensor: str = "", seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    add_tokenizer(writer, ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])

    def add(name: str, *shape: int) -> None:
        numbers: NDArray[np.float32] = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        writer.add_tensor(f"{name}.weight", 1 + numbers if len(shape) == 1 else numbers)

    def add_quantized(name: str, *shape: int) -> None:
        numbers = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind)

    add_quantized("token_embd", VOCAB, HIDDEN)
    add("output_norm", HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm", HIDDEN)
        add(f"blk.{layer}.ffn_norm", HIDDEN)
        writer.add_tensor(f"blk.{layer}.attn_q.weight", interleave(hub_attention(layer, "q"), HEADS))
        writer.add_tensor(f"blk.{layer}.attn_k.weight", interleave(hub_attention(layer, "k"), KV_HEADS))
        writer.add_tensor(f"blk.{layer}.attn_v.weight", hub_attention(layer, "v"))
        writer.add_tensor(f"blk.{layer}.attn_output.weight", hub_attention(layer, "o"))
        add_quantized(f"blk.{layer}.ffn_gate", FFN, HIDDEN)
        add_quantized(f"blk.{layer}.ffn_up", FFN, HIDDEN)
        add_quantized(f"blk.{layer}.ffn_down", HIDDEN, FFN)
    if extra_tensor:
        add(extra_tensor, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
