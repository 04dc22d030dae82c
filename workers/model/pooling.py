"""How an embedding model pools, from its folder in the layout of Sentence Transformers. Reads one file."""

import json
from pathlib import Path

MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


def read_pooling(folder: Path) -> str:
    """ "mean" or "last"; empty: the folder does not say that it is an embedding model, or it pools otherwise."""
    try:
        config = json.loads((folder / "1_Pooling" / "config.json").read_text())
    except (OSError, ValueError):
        return ""
    found = [mode for name, mode in MODES.items() if isinstance(config, dict) and config.get(name) is True]
    return found[0] if len(found) == 1 else ""
