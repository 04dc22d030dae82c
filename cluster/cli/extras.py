"""The extras and their libraries, for the error if a command's library is missing."""

EXTRAS = {
    "simulate": ("aiohttp", "numpy", "xxhash", "jinja2", "psutil"),
    "pictures": ("matplotlib",),
    "serve": (
        *("torch", "ray", "grpc_reflection", "transformers", "tokenizers", "gguf", "safetensors"),
        *("huggingface_hub", "platformdirs", "prometheus_client"),
    ),
    "http": ("fastapi", "starlette", "uvicorn", "pydantic"),
}
EXTRA_OF = {library: extra for extra, libraries in EXTRAS.items() for library in libraries}
NEED_WORKERS = frozenset({"demo", "serve", "gateway", "leave", "models", "doctor"})  # need more than `simulate` has


def missing_extra(error: BaseException, command: str) -> str | None:
    """The error line for a missing library of an extra; None for other errors."""
    library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    extra = "serve" if command in NEED_WORKERS and EXTRA_OF.get(library) == "simulate" else EXTRA_OF.get(library)
    if extra is None:
        return None
    return f"`diptych {command}` needs {library}, which is not installed: pip install 'diptych[{extra}]'"
