"""A Llama of a known shape with random weights, made on the device: no file has to be brought along."""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtransfer.layout import KVLayout
from workers.executor.kv_pool import KVPool, allocate_pool
from workers.executor.rank import ModelPart
from workers.model.decoder import Decoder, Layer, Output
from workers.model.description import LayerConfig, ModelConfig, RopeConfig
from workers.model.feed_forward import FeedForward
from workers.ops.attention import best_attention
from workers.ops.linear import make_linear


@dataclass(frozen=True, slots=True)
class LlamaShape:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def linear_weights(self) -> int:
        """Weights of matrix products that every token meets, without embedding and head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_numbers(self) -> int:
        """Of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_8B = LlamaShape(32, 4096, 14336, 32, 8, 128, 128256)  # Llama 3.1 8B
TINY = LlamaShape(2, 64, 96, 4, 2, 16, 320)
CONTEXT = 131072
ROPE = RopeConfig(theta=500000.0, rotary_dim=128)


def random_llama(shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> ModelPart:
    """A whole model on one device, with the attention that a worker would choose."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(0.0, 1 / math.sqrt(columns), generator=generator)

    ones = torch.ones(shape.hidden, dtype=dtype, device=device)

    def layer() -> Layer:
        qkv = draw((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden)
        output = make_linear(draw(shape.hidden, shape.heads * shape.head_dim))
        up, down = make_linear(draw(2 * shape.ffn, shape.hidden)), make_linear(draw(shape.hidden, shape.ffn))
        return Layer(ones, make_linear(qkv), None, Output(output), None, ones, FeedForward(up, down, "silu"), None)

    attention = best_attention(device, dtype, deterministic=False)
    layers = tuple(layer() for _ in range(shape.layers))
    embedding = partial(F.embedding, weight=draw(shape.vocab, shape.hidden) * math.sqrt(shape.hidden))
    head = make_linear(draw(shape.vocab, shape.hidden))
    return ModelPart(Decoder(described(shape, dtype), embedding, layers, ones, head, attention))


def described(shape: LlamaShape, dtype: torch.dtype) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=shape.hidden,
        ffn_size=shape.ffn,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        context_length=CONTEXT,
        layers=(LayerConfig(replace(ROPE, rotary_dim=shape.head_dim)),) * shape.layers,
        rms_eps=1e-5,
        tie_embeddings=False,
        eos_token_ids=(0,),
        dtype=str(dtype).removeprefix("torch."),
        attention_scale=shape.head_dim**-0.5,
    )


def filled_pool(
    shape: LlamaShape, num_blocks: int, device: torch.device, dtype: torch.dtype, block_size: int = 16
) -> KVPool:
    """A pool with random numbers in every block."""
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout("random", shape.layers, shape.kv_heads, shape.head_dim, block_size, name)
    pool = allocate_pool(layout, num_blocks, device)
    pool.blocks.normal_()
    return pool
