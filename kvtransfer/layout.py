"""The memory layout of one rank's KV block pool.

One pool, one registration per rank, ordered `[block, kv_head, layer, k|v, slot, head_dim]`: a whole block is one
contiguous range over all layers, and a tensor-parallel head slice of a block is still one contiguous range. With latent
attention (MLA) the k|v axis has one vector, which is key and value of all query heads.
Knows shapes and bytes; knows no device and no transport.
"""

import hashlib
from dataclasses import dataclass

ORDER = "block,kv_head,layer,kv,slot,head_dim"
LATENT_ORDER = "block,kv_head,layer,latent,slot,head_dim"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}  # fp8 is e4m3
QUANTIZED = ("int8", "fp8")
SCALE_BYTES = 4  # after the numbers of a quantized slot: their scale, a float32


def slot_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one token's K (or V, or latent) of one head and layer."""
    return head_dim * DTYPE_BYTES[dtype] + (SCALE_BYTES if dtype in QUANTIZED else 0)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV of one rank. `layers` and `heads` are half-open ranges of the whole model's layers and KV heads.

    `model` names the weights (a content hash or a hub revision): KV of other weights is never compatible.
    `state_layers`: those whose cells hold the state of linear-attention layers after a block's last token, not KV.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens (slots) a block
    dtype: str = "float32"
    layers: tuple[int, int] = (0, -1)
    heads: tuple[int, int] = (0, -1)
    order: str = ORDER
    state_layers: tuple[int, ...] = ()  # ascending, in the whole model

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.order not in (ORDER, LATENT_ORDER):
            raise ValueError(f"KV order {self.order!r} is neither {ORDER} nor {LATENT_ORDER}")
        for name, total in (("layers", self.num_layers), ("heads", self.num_kv_heads)):
            start, stop = getattr(self, name)
            stop = total if stop == -1 else stop
            if not 0 <= start < stop <= total:
                raise ValueError(f"{name} {start}..{stop} are outside the model's {total}")
            object.__setattr__(self, name, (start, stop))

    @property
    def vectors(self) -> int:
        """Of one token, head and layer: K and V, or one latent."""
        return 1 if self.order == LATENT_ORDER else 2

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: [kv_head, layer, k|v, slot, head_dim]; a quantized slot has its scale's bytes, too."""
        local_heads, local_layers = self.heads[1] - self.heads[0], self.layers[1] - self.layers[0]
        return (local_heads, local_layers, self.vectors, self.block_size, self.slot_bytes // DTYPE_BYTES[self.dtype])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one of a token's vectors, of one head and layer."""
        return slot_bytes(self.head_dim, self.dtype)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one head and layer in a block."""
        return self.vectors * self.block_size * self.slot_bytes

    @property
    def block_bytes(self) -> int:
        heads, layers, *_ = self.shape
        return heads * layers * self.cell_bytes

    @property
    def content(self) -> tuple[object, ...]:
        """Equal for two ranks whose KV describes the same numbers, however sharded, cut into blocks and rounded.

        State belongs to a block and has its own format, so with it block size and dtype must be equal, too.
        """
        facts: tuple[object, ...] = (self.model, self.num_layers, self.num_kv_heads, self.head_dim, self.order)
        return (*facts, self.block_size, self.dtype, self.state_layers) if self.state_layers else facts

    @property
    def fingerprint(self) -> str:
        """Of `content`."""
        return hashlib.sha256(repr(self.content).encode()).hexdigest()[:16]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def digested_tokens(self, num_tokens: int) -> int:
        """How many slots of the blocks of `num_tokens` tokens digests take in: with state all, as it fills a cell."""
        return self.blocks_for(num_tokens) * self.block_size if self.state_layers else num_tokens
