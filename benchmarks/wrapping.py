"""Wraps generated Markdown to the line width of the other pages."""

from textwrap import fill

STANDALONE = ("#", "|", "![", "```", "- ")  # a line that starts with one of these does not continue a paragraph
WIDTH = 120


def wrap_markdown(text: str) -> str:
    """Wrap paragraphs and list items; keep tables, headings and code."""
    made: list[str] = []
    code = False
    for line in text.splitlines():
        code ^= line.startswith("```")
        if (
            line
            and not code
            and not line.startswith(STANDALONE)
            and made
            and made[-1]
            and not made[-1].startswith("```")
        ):
            made[-1] += f" {line.strip()}"
        else:
            made.append(line)
    return "\n".join(map(_wrapped, made)) + "\n"


def _wrapped(line: str) -> str:
    if line[:1] in ("", "#", "|", "!"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
