"""Code of docs/integrations that names what is not installed here, for tests that stand in."""

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "integrations"


def printed(page, language):
    """The first block of that language on a page."""
    text = (PAGES / f"{page}.md").read_text()
    return re.search(rf"^```{language}\b[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
