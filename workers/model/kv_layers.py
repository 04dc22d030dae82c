"""Where the layers of a model lie in a block of the KV pool.

A block is made of cells of equal size, one for each KV head and KV layer. A layer with attention has one KV layer, for
K and V of the block's tokens. Linear layers that follow each other share KV layers: as many as hold their states after
the block's last token, one state behind another, whatever the size of a block.

    layers of a model   linear linear linear attention | linear linear linear attention
    its KV layers       state state          K and V   | state state          K and V      a state takes 2/3 of a cell

Knows sizes; knows no weights and no torch.
"""

from dataclasses import dataclass

from kvtransfer.layout import LATENT_ORDER, ORDER, KVLayout, slot_bytes
from workers.model.description import ModelConfig

STATE_BYTES = 4  # of a number: state is float32, whatever the dtype of KV


@dataclass(frozen=True, slots=True)
class KVPlace:
    """The KV layers [first, end) of a layer, and how many bytes from their beginning its state begins."""

    first: int
    end: int
    state_offset: int = 0


def kv_places(config: ModelConfig, cell_bytes: int) -> tuple[KVPlace, ...]:
    """Of each layer. `cell_bytes`: K and V of a block's tokens, of one KV head and layer."""
    places: list[KVPlace] = []
    state_bytes = STATE_BYTES * sum(config.linear.state_numbers(config.num_kv_heads)) if config.linear else 0
    for first, end in config.runs:
        below = places[-1].end if places else 0
        if config.layers[first].is_linear:
            top = below + -(-(end - first) * state_bytes // cell_bytes)
            places += [KVPlace(below, top, at * state_bytes) for at in range(end - first)]
        else:
            places.append(KVPlace(below, below + 1))
    return tuple(places)


def kv_layout(config: ModelConfig, model: str, block_size: int, dtype: str) -> KVLayout:
    """The KV of the whole model, whose weights are called `model`."""
    order = LATENT_ORDER if config.latent else ORDER
    layout = KVLayout(model, config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype, order=order)
    if config.linear is None:
        return layout
    places = kv_places(config, layout.cell_bytes)
    linear = [place for place, layer in zip(places, config.layers, strict=True) if layer.is_linear]
    state_layers = sorted({each for place in linear for each in range(place.first, place.end)})
    return KVLayout(
        model, places[-1].end, config.num_kv_heads, config.head_dim, block_size, dtype, state_layers=tuple(state_layers)
    )


def min_block_size(config: ModelConfig, dtype: str) -> int:
    """The smallest multiple of 16 tokens with which a linear layer's state fits a cell; 0 without such layers."""
    if config.linear is None:
        return 0
    state_bytes = STATE_BYTES * sum(config.linear.state_numbers(config.num_kv_heads))
    return 16 * -(-state_bytes // (32 * slot_bytes(config.head_dim, dtype)))


def kv_range(config: ModelConfig, layout: KVLayout, layers: tuple[int, int]) -> tuple[int, int]:
    """The KV layers of these consecutive layers, which end no group of linear ones in its middle."""
    places = kv_places(config, layout.cell_bytes)
    return places[layers[0]].first, places[layers[1] - 1].end
