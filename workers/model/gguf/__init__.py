"""GGUF files: read, and converted into a model folder in hub layout."""
