"""Code of docs/INTEGRATIONS.md that names what is not installed here, for tests that stand in."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "INTEGRATIONS.md"


def printed(heading, language):
    """The first block of that language below a heading."""
    section = DOCUMENT.read_text().partition(f"\n## {heading}\n")[2]
    return re.search(rf"^```{language}\b[^\n]*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1]
