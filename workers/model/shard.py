"""Which part of a model one rank of a gang computes.

Knows sizes; knows no weights, no torch and no process. Rank = stage * tensor + tensor rank. A stage has consecutive
whole layers. Each tensor rank has whole KV heads with the query heads that read them, columns of every feed-forward,
and rows of the vocabulary (Shoeybi et al., Megatron-LM, 2019). With more tensor ranks than KV heads, several ranks hold
the same KV head and share its query heads:

    9 query, 3 KV heads, tensor 2     KV 0 | KV 1 2         query 0-2 | 3-8
    8 query, 2 KV heads, tensor 3     KV 0 | KV 0 | KV 1    query 0-1 | 2-3 | 4-7

The heads of linear attention belong to KV heads in the same way. Ranks with the same KV head compute the state of all
its value heads, and each takes the output of some. Linear layers that follow each other stay on one stage.
"""

from dataclasses import dataclass, replace

from workers.config import ParallelConfig
from workers.errors import ModelError
from workers.model.description import ModelConfig

UNIT = 32  # columns that stay together if there are enough: a block of the quantized formats, two cache lines

Range = tuple[int, int]  # [first, end)


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's part, as half-open ranges of the whole model; (0, 0) for a part that the model does not have."""

    tensor_rank: int
    tensor: int
    stage: int
    stages: int
    layers: Range
    heads: Range
    kv_heads: Range
    value_heads: Range
    ffn: Range
    expert_ffn: Range
    shared_ffn: Range
    vocab: Range

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.stage == self.stages - 1

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """The configuration with this rank's layers, heads and KV heads; the vocabulary stays whole."""
        linear, kv_heads = config.linear, self.kv_heads[1] - self.kv_heads[0]
        if linear is not None:
            linear = replace(
                linear,
                key_heads=linear.key_heads // config.num_kv_heads * kv_heads,
                value_heads=linear.value_heads // config.num_kv_heads * kv_heads,
            )
        return replace(
            config,
            linear=linear,
            num_heads=self.heads[1] - self.heads[0],
            num_kv_heads=self.kv_heads[1] - self.kv_heads[0],
            layers=config.layers[slice(*self.layers)],
        )


def shard_of(config: ModelConfig, parallel: ParallelConfig, rank: int) -> ModelShard:
    """The part of `rank` in [0, parallel.world_size). Raises `ModelError` if the model is too small for `parallel`."""
    if not 0 <= rank < parallel.world_size:
        raise ValueError(f"rank {rank} is outside a gang of {parallel.world_size}")
    check_parallel(config, parallel)
    stage, tensor_rank = divmod(rank, parallel.tensor)
    experts, runs = config.experts, config.runs
    first, end = split(len(runs), parallel.pipeline, stage)

    def columns(width: int) -> Range:
        return split_units(width, parallel.tensor, tensor_rank)

    kv_heads, heads = _heads(config, config.num_heads, parallel.tensor, tensor_rank)
    return ModelShard(
        tensor_rank=tensor_rank,
        tensor=parallel.tensor,
        stage=stage,
        stages=parallel.pipeline,
        layers=(runs[first][0], runs[end - 1][1]),
        heads=heads,
        kv_heads=kv_heads,
        value_heads=_heads(config, config.linear.value_heads, parallel.tensor, tensor_rank)[1]
        if config.linear
        else (0, 0),
        ffn=columns(config.ffn_size),
        expert_ffn=columns(experts.ffn_size if experts else 0),
        shared_ffn=columns(experts.shared_ffn_size if experts else 0),
        vocab=columns(config.vocab_size),
    )


def check_parallel(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ModelError` if a rank would have no work."""
    if parallel.pipeline > len(config.runs):
        what = "groups of linear-attention layers and layers between them" if config.linear else "layers"
        raise ModelError(
            f"parallel.pipeline is {parallel.pipeline}, but the model has {len(config.runs)} {what}; "
            f"set it to {len(config.runs)} or less"
        )
    widths = [(config.num_heads, "attention heads"), (config.vocab_size, "tokens in its vocabulary")]
    if config.linear:
        widths.append((config.linear.value_heads, "value heads in linear attention"))
    if not all(layer.has_experts for layer in config.layers):
        widths.append((config.ffn_size, "feed-forward columns"))
    if config.experts:
        widths.append((config.experts.ffn_size, "columns in an expert"))
        if config.experts.shared_ffn_size:
            widths.append((config.experts.shared_ffn_size, "columns in its shared expert"))
    width, what = min(widths)
    if parallel.tensor > width:
        raise ModelError(
            f"parallel.tensor is {parallel.tensor}, but the model has {width} {what}; set it to {width} or less"
        )


def split(count: int, parts: int, index: int) -> Range:
    """The index-th of `parts` consecutive ranges, whose lengths differ by at most one."""
    return index * count // parts, (index + 1) * count // parts


def split_units(width: int, parts: int, index: int) -> Range:
    """As `split`, with borders at multiples of `UNIT` unless that would leave a rank empty."""
    units = -(-width // UNIT)
    if units < parts:
        return split(width, parts, index)
    first, end = split(units, parts, index)
    return min(first * UNIT, width), min(end * UNIT, width)


def _heads(config: ModelConfig, num_heads: int, tensor: int, tensor_rank: int) -> tuple[Range, Range]:
    """The KV heads of a tensor rank, and which of `num_heads` heads that share them."""
    kv_heads, group = config.num_kv_heads, num_heads // config.num_kv_heads
    if tensor <= kv_heads:
        first, end = split(kv_heads, tensor, tensor_rank)
        return (first, end), (first * group, end * group)
    kv_head = tensor_rank * kv_heads // tensor
    first, end = (-(-head * tensor // kv_heads) for head in (kv_head, kv_head + 1))  # the ranks that hold it
    low, high = split(group, end - first, tensor_rank - first)
    return (kv_head, kv_head + 1), (kv_head * group + low, kv_head * group + high)
