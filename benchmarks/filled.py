"""Pages that are generated, with lines as long as those of pages written by hand."""

from textwrap import fill

ALONE = ("#", "|", "![", "```", "- ")  # begins a line that goes on with no line before it
WIDTH = 120


def filled(text: str) -> str:
    """Paragraphs and items filled to the width of the other pages; tables, headings and code as they are."""
    made: list[str] = []
    code = False
    for line in text.splitlines():
        code ^= line.startswith("```")
        if line and not code and not line.startswith(ALONE) and made and made[-1] and not made[-1].startswith("```"):
            made[-1] += f" {line.strip()}"
        else:
            made.append(line)
    return "\n".join(map(_wrapped, made)) + "\n"


def _wrapped(line: str) -> str:
    if line[:1] in ("", "#", "|", "!"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
