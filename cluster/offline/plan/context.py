"""Whether the requests of a plan are longer than the model's context. Pure."""

from cluster.offline.plan.load import PlanLoad
from workers.profiles.shapes import shape_of


def too_long(model: str, load: PlanLoad) -> list[str]:
    """A warning if requests are longer than the context."""
    context = shape_of(model).context_length
    lengths = [each.prompt_tokens + each.output_tokens for each in load.source.arrivals]
    share = sum(length > context for length in lengths) / len(lengths) if context else 0.0
    if not share:
        return []
    return [
        f"Warning: {share:.1%} of the requests are longer than the context of {model} ({context:,} tokens). A server "
        "refuses them; this plan serves them, as if the model took them"
    ]
