"""A machine's limit: the maximum tokens per second of a column, from the bytes to read and the operations to compute.

a step takes at least  max(bytes it must read / read bandwidth,  operations / rate of matrix products)
"""

from collections.abc import Mapping
from dataclasses import dataclass

KV_BYTES = 4  # of a float32 value in the KV cache
BITS = {  # per weight, with its share of its block's scales
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "int8": 8.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "q4_k": 4.5,
}


@dataclass(frozen=True, slots=True)
class Column:
    """A measurement: a prompt of `context` tokens to its first token (`batch` 0), or a decode step of a batch."""

    name: str
    batch: int
    context: int
    steps: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one lap."""
        return self.batch or self.context


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """A decoder with grouped KV heads. `matrix`: weights of all layers; `head`: weights of the output projection."""

    matrix: int
    head: int
    layers: int
    query: int  # heads * head_dim
    kv: int  # kv heads * head_dim

    @staticmethod
    def of(config: Mapping[str, int], num_parameters: int) -> "DecoderSize":
        """From a model's config.json. Tied embeddings count as the head; others are only looked up."""
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        head = config["vocab_size"] * config["hidden_size"]
        embeddings = head if config.get("tie_word_embeddings") else 2 * head
        kv = config.get("num_key_value_heads", heads) * head_dim
        return DecoderSize(num_parameters - embeddings, head, config["num_hidden_layers"], heads * head_dim, kv)

    def operations(self, column: Column) -> float:
        """Multiplications and additions of one lap."""
        if column.batch:
            pairs, tokens, sampled = column.batch * column.context, column.batch, column.batch
        else:
            pairs, tokens, sampled = column.context * (column.context + 1) // 2, column.context, 1
        attention = 4 * self.layers * self.query * pairs
        return 2.0 * (self.matrix * tokens + self.head * sampled) + attention

    def read_bytes(self, column: Column, weights: str) -> float:
        """Bytes to read: each weight once, and for a decode the KV of every sequence."""
        context = column.batch * column.context * 2 * self.layers * self.kv * KV_BYTES
        return (self.matrix + self.head) * BITS[weights] / 8 + context


def most_tokens(size: DecoderSize, column: Column, weights: str, measured: Mapping[str, float]) -> float:
    """The machine's limit in tokens per second, from the measurements of `drivers.limits`.

    For weights below float32 the fastest precision counts.
    """
    read = max(rate for name, rate in measured.items() if name.startswith("read "))
    products = [
        rate
        for name, rate in measured.items()
        if not name.startswith("read ") and (weights != "float32" or name.startswith("float32 "))
    ]
    min_s = max(size.read_bytes(column, weights) / read, size.operations(column) / max(products))
    return column.tokens / min_s
