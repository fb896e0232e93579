"""What the site is built of besides Markdown: generated pages, deployment files, and the page of model families."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from dev import docs_site
from kvfold.cli.main import COMMANDS, build_parser
from tests.models import families
from tests.models.checkpoints import CHECKPOINTS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def _config() -> dict[str, Any]:
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _, suffix, __: suffix)
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), loader)
    return found


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = _pages(_config()["nav"])
    assert sorted(pages) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_the_site_loads_nothing_from_elsewhere() -> None:
    config = _config()
    assert config["strict"] is True and config["theme"]["font"] is False and "offline" in config["plugins"]
    styles = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in config["extra_css"]]
    assert [(ROOT / "docs" / name).exists() for name in config["extra"]["polyfills"]] == [True]
    assert not any("url(" in style or "@import" in style for style in styles) and "extra_javascript" not in config


def test_every_command_and_option_is_on_the_page() -> None:
    page = docs_site.cli_sections()
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert len(commands.choices) == len(COMMANDS)
    for name, command in commands.choices.items():
        assert f"\n## `kvfold {name}`\n" in page
        for action in command._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or option in page, (name, option)
    assert "%(default)s" not in page and "==SUPPRESS==" not in page


@pytest.mark.parametrize("page", docs_site.INCLUDED)
def test_included_texts_have_links_of_the_site(page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", docs_site.included(page)) if not link.startswith("http")]
    assert links and all((ROOT / "docs" / link).exists() for link in links)
    assert f"<!-- {page.removesuffix('.md')} -->" in (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_the_page_of_models_is_current(family: str) -> None:
    """The row of a family that runs, of one with windows, and of one that is refused."""
    page = families.PAGE.read_text(encoding="utf-8").split(families.BEGIN)[1].split(families.END)[0]
    tables = families.tables(families.attempt_all([family]))
    (row,) = (line for line in tables.splitlines() if line.startswith(f"| `{family}` |"))
    assert row in page.splitlines(), "run `python -m tests.models.families`"


def test_the_page_of_models_has_every_family() -> None:
    page = families.PAGE.read_text(encoding="utf-8")
    assert all(page.count(f"| `{family}` | {names} |") == 1 for family, names in CHECKPOINTS.items())


def test_the_readme_has_the_number_of_families_that_run() -> None:
    (running,) = re.findall(r"^(\d+) of \d+ families run", families.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"[{running} decoder families]" in (ROOT / "README.md").read_text(encoding="utf-8")


def _serve_options(words: list[str]) -> argparse.Namespace:
    return build_parser().parse_args(words[words.index("serve") :])


def test_deployments_start_the_server_with_options_that_exist() -> None:
    docker = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    entry, command = (
        yaml.safe_load(re.findall(rf"^{name} (\[.*\])$", docker, re.MULTILINE)[0]) for name in ("ENTRYPOINT", "CMD")
    )
    assert _serve_options(entry + command).host == "0.0.0.0"
    unit = (DEPLOY / "kvfold.service").read_text(encoding="utf-8").replace("\\\n", " ")
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    options = _serve_options(shlex.split(start))
    assert options.host == "127.0.0.1" and options.keys is not None


def test_the_image_copies_files_that_exist() -> None:
    docker = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.*)$", docker, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()[:-1]), line


def test_proxies_do_not_buffer_streams() -> None:
    assert "proxy_buffering off;" in (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    assert "flush_interval -1" in (DEPLOY / "Caddyfile").read_text(encoding="utf-8")
