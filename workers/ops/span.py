"""The unit in which a sequence's leading KV may lie in another worker's pool.

The state after a span is [tokens, heads, head_dim + 2] in float32: the largest score of each query and head, the sum of
its weights exp(score - largest), and the sum of the weighted values, as in flash attention. Before any key it is
(-inf, 0, 0).
"""

from workers.config import SPAN as SPAN
