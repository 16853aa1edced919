"""Which weights a model has: what the identity notices, what it ignores, what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvvault.errors import NamespaceError
from kvvault.integrations.vllm.weights import DigestCache, directory_digest, weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"header" + bytes(5000))
    (directory / "config.json").write_text('{"hidden_size": 8}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "generation_config.json").write_text("{}")
    (directory / "README.md").write_text("text")
    return directory


def digest(model: Path) -> str:
    return directory_digest(model, DigestCache(None))


def rewrite(path: Path, content: bytes) -> None:
    """Change a file's content and put its old times back, as a careless copy does."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_same_files_elsewhere_are_the_same_weights(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert digest(copy) == digest(model)


def test_a_change_deep_in_the_weights_is_noticed(model: Path) -> None:
    """Same header, same size, same time: two fine-tunes of one base model look like that."""
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    before = digest(model)
    rewrite(weights, content[:-1] + b"\1")
    assert digest(model) != before
    rewrite(weights, content)
    assert digest(model) == before


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "quantize_config.json",
        "modeling_own.py",
        "preprocessor_config.json",
        "pytorch_model.bin",  # some load formats read it though there are safetensors
    ],
)
def test_files_that_change_what_the_model_computes_count(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).write_text('{"hidden_size": 9}')
    assert digest(model) != before


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "chat_template.jinja",
        ".gitattributes",
    ],
)
def test_files_that_do_not_are_left_out(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).write_text("anything")
    assert digest(model) == before


def test_adding_renaming_and_removing_weights_is_noticed(model: Path) -> None:
    seen = {digest(model)}
    (model / "model-2.safetensors").write_bytes(b"more")
    seen.add(digest(model))
    (model / "model-2.safetensors").rename(model / "model-3.safetensors")
    seen.add(digest(model))
    (model / "model.safetensors").unlink()
    seen.add(digest(model))
    assert len(seen) == 4


def test_known_digests_are_used_until_the_file_changes(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "weights.json"
    right = directory_digest(model, DigestCache(path))
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(path.read_text())
    # Poison what is remembered: that shows that it is used ...
    document["sha256"] = dict.fromkeys(document["sha256"], "0" * 64)
    path.write_text(json.dumps(document))
    assert directory_digest(model, DigestCache(path)) != right
    # ... and that it is not once a file was touched, even if size and time are as before.
    weights = model / "model.safetensors"
    config = model / "config.json"
    for file in (weights, config):
        rewrite(file, file.read_bytes())
    assert directory_digest(model, DigestCache(path)) == right


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 9, "sha256": {}}', '{"sha256": 1}']
)
def test_a_damaged_cache_is_ignored(model: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "weights.json"
    path.write_text(content)
    assert directory_digest(model, DigestCache(path)) == digest(model)


def test_a_cache_that_cannot_be_written_is_no_problem(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert directory_digest(model, DigestCache(blocked / "weights.json")) == digest(model)


def test_a_local_directory_is_named_by_content(model: Path) -> None:
    found = weights_identity(str(model), None, DigestCache(None))
    assert found == f"sha256:{digest(model)}"


def test_a_snapshot_is_named_by_its_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some-org--a-model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x")
    found = weights_identity(str(snapshot), None, DigestCache(None))
    assert found == f"hf:some-org/a-model@{COMMIT}"
    online = weights_identity("some-org/a-model", COMMIT, DigestCache(None))
    assert online == found


@pytest.mark.parametrize("commit", [None, "main", "0123456"])
def test_a_repository_without_a_commit_is_refused(commit: str | None) -> None:
    assert weights_identity("org/name", COMMIT, DigestCache(None))
    with pytest.raises(NamespaceError, match="which weights"):
        weights_identity("org/name", commit, DigestCache(None))


def test_a_single_file_is_refused(model: Path) -> None:
    with pytest.raises(NamespaceError, match="which weights"):
        weights_identity(str(model / "model.safetensors"), COMMIT, DigestCache(None))


def test_a_directory_without_weights_is_refused(model: Path) -> None:
    assert digest(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(NamespaceError, match="no weight files"):
        digest(model)


def test_files_that_cannot_be_read_are_an_error_without_their_path(model: Path) -> None:
    (model / "model-2.safetensors").symlink_to(model / "config.json")
    assert digest(model)
    target = model / "gone.json"
    target.write_text("{}")

    class Vanishing(DigestCache):
        def get(self, facts: os.stat_result) -> str | None:
            raise PermissionError(13, "Permission denied", str(target))

    with pytest.raises(NamespaceError, match="Permission denied") as caught:
        directory_digest(model, Vanishing(None))
    assert str(model) not in str(caught.value)


def test_a_file_that_changes_under_the_reader_is_an_error(model: Path) -> None:
    weights = model / "model.safetensors"

    class Racing(DigestCache):
        def get(self, facts: os.stat_result) -> str | None:
            if facts.st_size == weights.stat().st_size:
                weights.write_bytes(weights.read_bytes() + b"!")
            return None

    with pytest.raises(NamespaceError, match="changed while"):
        directory_digest(model, Racing(None), threads=1)
