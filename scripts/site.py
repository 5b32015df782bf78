"""Hooks of MkDocs for the documentation's site: links into the repository become plain text, decisions are listed from
their folder, commands show their examples, and `llms.txt` lists all pages for language models."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from lastbit.cli import cli

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    decisions = sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/decisions").glob("[0-9]*.md")
    )
    decisions.insert(0, "decisions.md")
    explanation = next(section["Explanation"] for section in config.nav or [] if "Explanation" in section)
    next(entry for entry in explanation if "Decisions" in entry)["Decisions"] = decisions
    _show_epilogs(cli)
    return config


def _show_epilogs(command: click.Command) -> None:
    """mkdocs-click shows only a command's help: move the examples there."""
    if command.epilog:
        paragraphs = command.epilog.replace("\b\n", "").strip()
        command.help = "\n".join([command.help or "", "", "```text", paragraphs, "```"])
        command.epilog = None
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            _show_epilogs(subcommand)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show only the text of links that leave docs/, since the site doesn't have their targets."""

    def replace(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if image or "://" in target or target.startswith("#"):
            return match[0]
        path = posixpath.join("docs", posixpath.dirname(page.file.src_uri), target.partition("#")[0])
        inside = posixpath.normpath(path).startswith("docs/")
        return match[0] if inside else text

    return _LINK.sub(replace, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt: each page with its title and first sentence (https://llmstxt.org)."""
    lines = ["# Lastbit", "", f"> {config.site_description}.", ""]
    for section in config.nav or []:
        for name, entries in section.items():
            lines += [f"## {name}", "", *_entries(entries), ""]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines))


def _entries(entries: Any) -> list[str]:
    if isinstance(entries, list):
        return [line for entry in entries for line in _entries(entry)]
    if isinstance(entries, dict):
        return [line for entry in entries.values() for line in _entries(entry)]
    title = re.search(r"^# (.+)$", (ROOT / "docs" / entries).read_text(), re.MULTILINE)
    address = "./" if entries == "index.md" else f"{entries.removesuffix('.md')}/"
    return [f"- [{title[1] if title else entries}]({address})"]
