"""The Python snippets of docs/http.md and docs/client.md."""

import re
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
IMPORTED = re.compile(r"^(?:from|import) (\w+)", re.M)
URL, ENDPOINT, MODEL = "http://127.0.0.1:8000", "127.0.0.1:50051", "Qwen/Qwen2.5-0.5B-Instruct"


def snippets(page: str) -> Mapping[str, str]:
    """By the first library that one imports besides Python's `typing`."""
    found = FENCE.findall((DOCS / page).read_text())
    return {next(name for name in IMPORTED.findall(each) if name != "typing"): each for each in found}


def placed(source: str, url: str, model: str, endpoint: str = "") -> str:
    """The snippet for this server. Raises `ValueError` if it asks for none."""
    if URL not in source and ENDPOINT not in source:
        raise ValueError("a snippet names the address of its server")
    return source.replace(URL, url).replace(ENDPOINT, endpoint).replace(MODEL, model)
