"""How many tokens a model takes, and whether the requests of a plan have more. Knows models by name; pure, except that
it reads a config.json."""

import json
from contextlib import suppress
from pathlib import Path

from cluster.offline.plan.load import PlanLoad
from workers.profiles.shapes import canonical

CONTEXT_TOKENS = {  # `max_position_embeddings` of the weights
    **dict.fromkeys(("opt-13b", "opt-66b", "opt-175b", "bloom-176b"), 2048),
    **dict.fromkeys(("llama-2-7b", "llama-2-13b", "llama-2-70b"), 4096),
    **dict.fromkeys(("llama-3-8b", "llama-3-70b", "smollm2-135m"), 8192),
    **dict.fromkeys(("mistral-7b", "qwen2.5-0.5b"), 32_768),
    **dict.fromkeys(("deepseek-v2-lite", "deepseek-v2", "deepseek-v3"), 163_840),
    "qwen2.5-7b": 131_072,
    "qwen3-0.6b": 40_960,
}


def context_tokens(model: str) -> int | None:
    """By name, or of a config.json or its folder. None: not known."""
    if (known := CONTEXT_TOKENS.get(canonical(model))) is not None:
        return known
    path = Path(model).expanduser()
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        found = (config.get("text_config") or config).get("max_position_embeddings")
        return found if isinstance(found, int) and found > 0 else None
    return None


def too_long(model: str, load: PlanLoad) -> list[str]:
    """A warning if requests are longer than the context."""
    context = context_tokens(model)
    lengths = [each.prompt_tokens + each.output_tokens for each in load.source.arrivals]
    share = sum(length > context for length in lengths) / len(lengths) if context else 0.0
    if not share:
        return []
    return [
        f"Warning: {share:.1%} of the requests are longer than the context of {model} ({context:,} tokens). A server "
        "refuses them; this plan serves them, as if the model took them"
    ]
