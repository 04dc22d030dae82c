"""Tool calls and reasoning in a model's answers: parsers for streams of text, and grammars that enforce calls. Pure."""
