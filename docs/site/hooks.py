"""MkDocs calls these functions; mkdocs.yml names this file. Run it from the repository's root."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.site import deepspeed_tables, families, megatron_flags, pages, public_scripts, reference


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation."""
    config.nav = pages.navigation(reference.TITLES)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the pages and files outside docs/ that pages link to."""
    made = {pages.START: pages.start_page()} | reference.reference_pages()
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for source in (*pages.SITE_PATHS, *pages.linked_files()):
        path = pages.site_path(source)
        files.append(File.generated(config, path, abs_src_path=str(pages.ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Change what GitHub and the site need differently, and add the tables that are made from the code."""
    if page.file.src_uri == families.PAGE:
        markdown = markdown.replace(families.MARKER, families.table())
    if page.file.src_uri == megatron_flags.PAGE:
        markdown = markdown.replace(megatron_flags.MARKER, megatron_flags.table())
    if page.file.src_uri == public_scripts.PAGE:
        markdown = markdown.replace(public_scripts.MARKER, public_scripts.tables())
    if page.file.src_uri == deepspeed_tables.PAGE:
        markdown = deepspeed_tables.with_tables(markdown)
    return pages.site_text(markdown, page.file.src_uri)
