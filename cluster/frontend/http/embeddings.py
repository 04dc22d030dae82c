"""The body and the answer of OpenAI's `/v1/embeddings`. Pure."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cluster.frontend.embedding import PromptEmbedding
from cluster.frontend.http.bodies import NOTHING, Body, one_or_more_prompts
from cluster.frontend.text import RawPrompt
from workers.errors import InvalidRequest
from workers.request import SamplingParams


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    input: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None

    @property
    def client_names(self) -> Mapping[str, str]:
        return {"prompt": "input"}

    def prompts(self) -> list[RawPrompt]:
        """Text, token ids, or a list of either."""
        return one_or_more_prompts("input", self.input, self.add_special_tokens is not False)

    def sampling(self, defaults: Mapping[str, Any] = NOTHING) -> SamplingParams:
        """Embeddings sample nothing that is sent. Raises `InvalidRequest`."""
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest("dimensions", f"is {self.dimensions}; it must be at least 1")
        return SamplingParams()


def embeddings_json(model: str, found: Sequence[PromptEmbedding], body: EmbeddingsBody) -> bytes:
    """The answer. base64 is that of little-endian float32."""
    vectors = [each.cut(body.dimensions).vector for each in found]
    if body.encoding_format == "base64":
        values: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    else:
        values = [vector.tolist() for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)]
    tokens = sum(each.num_tokens for each in found)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json.dumps({"object": "list", "data": data, "model": model, "usage": usage}).encode()
