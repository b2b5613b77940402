"""Hooks of MkDocs: pages that are written for GitHub become a site without a second list of pages.

The navigation is that of docs/README.md: its headings are sections, its links are pages. Links from pages to files
outside docs/, such as ../CONTRIBUTING.md, lead to the repository on GitHub.
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)\s]*)(?=\))")
ROW_LINK = re.compile(r"\[([^]]+)\]\(([^)#]+\.md)\)")


def navigation(index: str) -> list[dict[str, Any]]:
    """The sections of docs/README.md with the pages that the first column of their tables links."""
    sections: list[dict[str, Any]] = [{"Overview": "README.md"}]
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        heading, _, rest = part.partition("\n")
        first_columns = "\n".join(line.split("|")[1] for line in rest.splitlines() if line.startswith("| ["))
        sections.append({heading: [{title: path} for title, path in ROW_LINK.findall(first_columns)]})
    return sections


def external_links(markdown: str, page: str, repository: str) -> str:
    """Markdown of the page at this path in docs/, with links to files outside docs/ as links to the repository."""

    def replace(link: re.Match[str]) -> str:
        path, anchor = re.fullmatch(r"([^#]*)(#.*)?", link[1]).groups()  # type: ignore[union-attr]
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
        return link[1] if target.startswith("docs/") else f"{repository}/blob/main/{target}{anchor or ''}"

    return LINK.sub(replace, markdown)


def on_config(config: Any) -> Any:
    with open(posixpath.join(config["docs_dir"], "README.md")) as index:
        config["nav"] = navigation(index.read())
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    return external_links(markdown, page.file.src_uri, config["repo_url"].rstrip("/"))
