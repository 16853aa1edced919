"""Where settings come from, and which wins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvvault.config import Settings, default_config_path, load_settings
from kvvault.errors import ConfigError, UnsafeFileError
from tests.cli.conftest import Place
from tests.cli.support import run


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path / "c.toml", 'vault = "/file"\nkey_provider = "file:/file"\n')
    assert load_settings({}, config=config).vault == Path("/file")
    monkeypatch.setenv("KVVAULT_VAULT", "/env")
    loaded = load_settings({}, config=config)
    assert (loaded.vault, loaded.key_provider) == (Path("/env"), "file:/file")
    loaded = load_settings({"vault": "/flag"}, config=config)
    assert (loaded.vault, loaded.key_provider) == (Path("/flag"), "file:/file")
    monkeypatch.setenv("KVVAULT_VAULT", "")  # empty is unset
    assert load_settings({}, config=config).vault == Path("/file")


def test_defaults() -> None:
    assert load_settings({}) == Settings.model_construct(
        vault=None, key_provider=None, output="text", debug=False
    )


def test_the_file_is_found_where_the_platform_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write(default_config_path(), 'vault = "/default-place"\n')
    assert load_settings({}).vault == Path("/default-place")
    monkeypatch.setenv("KVVAULT_CONFIG", str(write(tmp_path / "o.toml", 'vault = "/named"\n')))
    assert load_settings({}).vault == Path("/named")
    other = write(tmp_path / "p.toml", 'vault = "/flagged"\n')
    assert load_settings({}, config=other).vault == Path("/flagged")


def test_paths_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load_settings({}, config=write(tmp_path / "c", 'vault = "~/kv"')).vault == Path(
        "/home/me/kv"
    )
    assert load_settings({}, config=write(tmp_path / "c", 'vault = "kv"')).vault == tmp_path / "kv"
    odd = write(tmp_path / "c", 'vault = "~nobody-of-that-name/kv"')
    assert load_settings({}, config=odd).vault == tmp_path / "~nobody-of-that-name/kv"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('vaul = "/x"', ["'vaul'", "c.toml"]),
        ("[vault]\npath = 3", ["'vault'", "c.toml"]),
        ("debug = 'perhaps-canary'", ["'debug'", "c.toml"]),
        ('output = "xml-canary"', ["'output'", "c.toml"]),
        ("vault = 3", ["'vault'", "c.toml"]),
        ('vault = "x', ["c.toml", "TOML"]),
        ("a = " + "[" * 100_000, ["c.toml"]),
        ("a = 2026-13-45", ["c.toml"]),
        ("\ufeff\0", ["c.toml"]),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    config = write(tmp_path / "c.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_settings({}, config=config)
    for word in words:
        assert word in str(caught.value)
    assert "canary" not in str(caught.value) + caught.value.hint
    result = run("status", "--config", config)
    assert result.code == 2
    result.assert_two_lines()


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "big").write_bytes(b"#" * ((1 << 20) + 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (
        tmp_path / "missing",
        tmp_path / "fifo",
        tmp_path / "big",
        tmp_path / "binary",
        tmp_path,
        Path("/dev/zero"),
        Path(__file__) / "below-a-file",
    ):
        with pytest.raises(ConfigError):
            load_settings({}, config=path)
        result = run("version", "--config", path)
        assert result.code == 2
        result.assert_two_lines()


def test_a_file_that_others_may_change_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path / "c.toml", "debug = true\n")
    assert load_settings({}, config=config).debug is True
    config.chmod(0o666)
    with pytest.raises(UnsafeFileError):
        load_settings({}, config=config)


@pytest.mark.parametrize(
    ("variable", "value"), [("KVVAULT_OUTPUT", "xml-canary"), ("KVVAULT_DEBUG", "perhaps-canary")]
)
def test_bad_variables_are_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    result = run("version")
    assert result.code == 2
    result.assert_two_lines()
    assert variable in result.err
    assert "canary" not in result.err


def test_an_empty_flag_is_not_the_current_directory(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.path)
    assert run("status", "--vault", ".", "--key-provider", place.key).code == 0
    result = run("status", "--vault", "", "--key-provider", place.key)
    assert result.code == 2
    assert "--vault" in result.err


def test_commands_take_their_settings_from_all_sources(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path / "c.toml", f'key_provider = "{place.key}"\noutput = "json"\n')
    monkeypatch.setenv("KVVAULT_VAULT", str(place.path))
    monkeypatch.setenv("KVVAULT_CONFIG", str(config))
    assert run("status").document["blocks"] == 12
    assert run("status", "--vault", tmp_path).error["exit_code"] == 10
