"""The forward pass of all model families: a decoder over a flat ragged token axis, with K and V in a paged pool.

Knows a model's description and shapes. Knows no family, file format, scheduler or sampling, and no other rank: the
callables hide communication (`workers.model.parallel`). With x [tokens, hidden]:

    x ← embedding[tokens] * scale
    each layer:  q, k, v = W_qkv · norm(x);  norm q and k, before or after a rotation by position;  k, v → pool
                 or, for a linear layer: its state, taken from the pool and back, instead of k and v (`DeltaNet`)
                 or q and one vector that is k and v (`Latent`)
                 x ← x + norm(W_out · attention(q, pool))
                 x ← x + norm(feed_forward(norm(x)))
    logits = cap(W_head · norm(x[rows to sample]))

A layer skips norms and rotations that its description leaves out. Source: Touvron et al., LLaMA (2023); grouped-query
attention, Ainslie et al. (2023); post-norms and soft caps, Gemma Team, Gemma 2 (2024); norms of q and k, Gemma 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.model.delta_net import DeltaNet
from workers.model.description import ModelConfig, RopeConfig
from workers.model.kv_layers import STATE_BYTES, KVPlace, kv_places
from workers.model.latent import Latent
from workers.model.rope import angles, frequencies
from workers.ops.attention import Attention
from workers.ops.batch import Heads, RaggedBatch, Scoring
from workers.ops.fused import add_rms_norm, rms_norm, rotate_and_write
from workers.ops.linear import LinearMethod
from workers.ops.lora import OUTPUT, QKV, Change, StepAdapters

Transform = Callable[[Tensor], Tensor]
Changeable = Callable[[Tensor, Change | None], Tensor]  # with the changes that adapters make
StatesOf = Callable[[int, Tensor], Callable[[], Tensor]]  # (layer, query) -> states of `RaggedBatch`
Rotations = dict[RopeConfig, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Output:
    """The linear layer behind attention."""

    linear: LinearMethod

    def __call__(self, x: Tensor, change: Change | None) -> Tensor:
        y = self.linear(x)
        if change is not None:
            change(OUTPUT, x, y)
        return y


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights; `qkv` has q, k and v stacked, then the gate of the attention's output if it has one.
    None: the model has no such norm. With `delta`, the layer is linear and `qkv` its `projected`. With `latent`, `qkv`
    has the projections before it stacked: of the query, and of latent and rotated key.
    """

    attention_norm: Tensor  # [hidden]
    qkv: LinearMethod  # [(heads + 2 * kv_heads) * head_dim, hidden]; with an output gate heads * head_dim more
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    output: Changeable  # [hidden, heads * head_dim]
    attention_post_norm: Tensor | None  # [hidden]
    ffn_norm: Tensor  # [hidden]
    feed_forward: Changeable
    ffn_post_norm: Tensor | None  # [hidden]
    sinks: Tensor | None = None  # [heads]: see `Attend`
    delta: DeltaNet | None = None
    latent: Latent | None = None


class Decoder:
    """Owned by one rank and called from one thread. Holds weights and frequencies; keeps no state between calls.

    A decoder may be one stage of a pipeline: then `config.layers` are its own layers, only the first stage has an
    embedding, and only the last a norm and a head. The output of `run` is the input of the next stage's `run`.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Transform | None,  # [tokens] to [tokens, hidden]
        layers: tuple[Layer, ...],
        final_norm: Tensor | None,  # [hidden]
        head: Callable[[Tensor], Tensor | None] | None,  # [rows, hidden] to [rows, vocab]
        attention: Attention,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.attention = attention
        self.ticks = 0  # half layers computed so far; other threads read it as a sign of progress
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        # In half precision, round the scale as in training.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self._frequencies = {rope: frequencies(rope).to(self.device) for rope in ropes}
        self._temperatures: Tensor | None = None  # of each `temperature.every` positions
        if (tuning := config.temperature) is not None:
            steps = torch.arange(config.context_length // tuning.every + 1, dtype=torch.float32)
            self._temperatures = (1.0 + tuning.scale * steps.log1p()).to(self.device)

    @property
    def device(self) -> torch.device:
        return self.layers[0].attention_norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].attention_norm.dtype

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, vocab] for hidden states [rows, hidden].

        None on all tensor ranks but the first; they must call it too.
        """
        assert self.head is not None, "logits come from the last stage"
        logits = self.head(hidden)
        return None if logits is None else _cap(logits, self.config.logit_softcap)

    def embed(self, tokens: Tensor) -> Tensor:
        """The input of the first stage's `run`: [tokens, hidden]."""
        assert self.embedding is not None, "only the first stage embeds tokens"
        x = self.embedding(tokens)
        if self.config.embedding_scale == 1.0:
            return x
        return x * self._embedding_scale

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        rows: Tensor,
        batch: RaggedBatch,
        pool: Tensor,
        states: StatesOf | None = None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """This stage's layers over x [tokens, hidden]; writes K and V of every token and layer into the pool.

        `states`: for a batch with `begins`, the states of each layer's rows before them. They are asked for when the
        layer's query is known, and awaited when all else in its attention is computed. `adapters`: of the rows of x.

        The last stage returns the head's input [rows, hidden], any other the next stage's input [tokens, hidden].
        Tokens and positions are int64 on the model's device, positions below the context length.
        """
        rotations = {
            rope: angles(positions, steps, rope.magnitude, self.dtype) for rope, steps in self._frequencies.items()
        }
        temperature = None
        if self._temperatures is not None and self.config.temperature is not None:
            temperature = self._temperatures[(positions + 1) // self.config.temperature.every, None, None]
        next_norms = [
            *(layer.attention_norm for layer in self.layers[1:]),
            self.final_norm,
        ]  # of the next layer, or the head
        places = None
        if self.config.linear is not None:
            places = kv_places(self.config, pool[0, 0, 0].nbytes)
        normed = rms_norm(x, self.layers[0].attention_norm, self.config.rms_eps)
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            change = None if adapters is None else adapters.of_layer(index)
            if layer.delta is not None:
                assert places is not None
                state = _state(pool, places[index], sum(layer.delta.sizes.state_numbers(layer.delta.kv_heads)))
                attended = layer.delta(normed, layer.qkv(normed), state, batch, block_size=pool.shape[4])
            else:
                kv_layer = index if places is None else places[index].first
                attended = self._attend(index, kv_layer, normed, rotations, temperature, batch, pool, states, change)
            self.ticks += 1
            if (
                self.final_norm is not None and index == len(self.layers) - 1
            ):  # all KV is written: continue with the sampled rows
                x, attended = x[rows], attended[rows]
                change = None if adapters is None else adapters.of_last_layer()
            delta = self._norm(layer.output(attended, change), layer.attention_post_norm)
            x, normed = add_rms_norm(x, delta, layer.ffn_norm, self.config.rms_eps)
            delta = self._norm(layer.feed_forward(normed, change), layer.ffn_post_norm)
            self.ticks += 1
            if next_norm is None:
                return x + delta
            x, normed = add_rms_norm(x, delta, next_norm, self.config.rms_eps)
        return normed

    def _attend(
        self,
        index: int,
        kv_layer: int,
        x: Tensor,
        rotations: Rotations,
        temperature: Tensor | None,
        batch: RaggedBatch,
        pool: Tensor,
        states: StatesOf | None,
        change: Change | None,
    ) -> Tensor:
        config, layer = self.config, self.layers[index]
        here = config.layers[index]
        qkv = layer.qkv(x)
        if change is not None:
            change(QKV, x, qkv)
        qkv, gate = qkv.tensor_split([qkv.shape[1] - config.output_gate * config.num_heads * config.head_dim], dim=-1)
        if layer.latent is not None:
            assert here.rope is not None
            query, key = layer.latent(qkv, *rotations[here.rope])
            self.attention.write_kv(pool, key, key, kv_layer, batch.slot_mapping)
        else:
            qkv = torch.unflatten(qkv, -1, (config.num_heads + 2 * config.num_kv_heads, config.head_dim))
            rotation = None if here.rope is None else rotations[here.rope]
            heads = Heads(rotation, layer.qk_norm, config.rotated_norm and rotation is not None, config.rms_eps)
            query = rotate_and_write(qkv, heads, pool, kv_layer, batch.slot_mapping, self.attention.write_kv)
            if rotation is None and temperature is not None:
                query = (query * temperature).to(query.dtype)
        if states is not None:
            batch = replace(batch, states=states(index, query))
        scoring = Scoring(config.attention_scale, here.window, config.attention_softcap, layer.sinks)
        attended = self.attention.attend(query, pool, kv_layer, batch, scoring)  # [tokens, heads, head_dim]
        if not config.output_gate:
            return attended.flatten(1)
        return attended.flatten(1) / (-gate).exp_().add_(1.0)  # its sigmoid; see `SharedExpert`

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x if the model has no such norm."""
        return x if weight is None else rms_norm(x, weight, self.config.rms_eps)


def _state(pool: Tensor, place: KVPlace, size: int) -> Tensor:
    """[blocks, kv_heads, size] float32: a linear layer's state in each block."""
    numbers = pool.view(*pool.shape[:2], -1).view(torch.float32)
    start = (place.first * pool[0, 0, 0].nbytes + place.state_offset) // STATE_BYTES
    return numbers[..., start : start + size]


def _cap(x: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(x / softcap) if softcap else x
