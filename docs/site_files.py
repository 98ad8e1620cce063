"""For mkdocs: a site with the paths of the repository, so that a link leads to the same in both."""

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


# A name of the API, its file and its summary, as a code host shows them.
SUMMARY = re.compile(r"^### \[`(torch_ros[\w.]*)`\]\(.*\)\n\n.+$", re.MULTILINE)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Replace the files of docs/ by those of the whole repository; keep those of the theme."""
    from mkdocs.structure.files import File, Files  # noqa: PLC0415  # tests do without mkdocs

    root = Path(config.config_file_path).parent
    listed = subprocess.run(
        ["git", "ls-files"],  # noqa: S607
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = [
        File(path, str(root), config.site_dir, config.use_directory_urls)
        for path in listed.stdout.splitlines()
        if (root / path).is_file()
    ]
    return Files([*theme, *ours])


def on_page_markdown(markdown: str, **_context: object) -> str:
    """Indent the parts of numbered items by four; three is enough elsewhere, but not for mkdocs.

    A name of the API with its summary becomes its docstring in full.

    A fence that says what our tests do with it is no fence to mkdocs: headings below it would go.
    """
    markdown = re.sub(r"^(```\w+) no-run$", r"\1", markdown, flags=re.MULTILINE)
    markdown = SUMMARY.sub(r"::: \1", markdown)
    return re.sub(r"^ {3}(?=\S)", "    ", markdown, flags=re.MULTILINE)
