"""The plugin, the version check, and reading vLLM's configuration."""

from __future__ import annotations

import dataclasses
import enum
import logging
import sys
from pathlib import Path

import pytest
import vllm.version
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvvault.errors import ConfigError, NamespaceError
from kvvault.integrations.vllm import plugin, shims
from kvvault.integrations.vllm.spec import KvvaultOffloadingSpec

pytestmark = pytest.mark.vllm


def test_registering_twice_is_registering_once() -> None:
    plugin.register()
    plugin.register()
    found = OffloadingSpecFactory.get_spec_cls({"spec_name": plugin.SPEC_NAME})
    assert found is KvvaultOffloadingSpec
    tier = SecondaryTierFactory.get_tier_class({"type": plugin.TIER_TYPE})
    assert tier.__name__ == "KvvaultTier"


@pytest.mark.parametrize(
    "missing", ["vllm.v1.kv_offload.factory", "vllm.v1.kv_offload.tiering.factory"]
)
def test_a_vllm_without_the_registries_still_starts(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM does not catch what a plugin raises: servers without kvvault would die of it."""
    monkeypatch.setitem(sys.modules, missing, None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "not available" in caplog.text


def test_the_tested_version_passes_silently(caplog: pytest.LogCaptureFixture) -> None:
    assert shims.vllm_version().startswith("0.32.")
    with caplog.at_level(logging.DEBUG):
        shims.check_version()
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.31.4", "0.22.0"])
def test_older_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.version, "__version__", version)
    with pytest.raises(ConfigError, match=version) as caught:
        shims.check_version()
    assert "0.32" in caught.value.hint


@pytest.mark.parametrize("version", ["0.33.0", "1.0.0", "dev", "0.40.0.dev3+g123"])
def test_versions_nobody_tried_are_named(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm.version, "__version__", version)
    with caplog.at_level(logging.WARNING):
        shims.check_version()
    assert version in caplog.text


class Configuration:
    instance_id = "one"


class Connector(KVConnectorBase_V1):  # type: ignore[misc]  # mypy does not follow vLLM
    """Constructs something that asks for the configuration, as OffloadingConnector does."""

    def __init__(self, depth: int) -> None:
        self._vllm_config = Configuration()
        self._kv_cache_config = object()
        self.found = self.deeper(depth)

    def deeper(self, depth: int) -> shims.EngineConfig:
        return self.deeper(depth - 1) if depth else shims.current_vllm_config()


Connector.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("depth", [0, 30])
def test_the_configuration_of_the_connector_under_construction_is_found(depth: int) -> None:
    connector = Connector(depth)
    assert connector.found.vllm is connector._vllm_config
    assert connector.found.kv_cache is connector._kv_cache_config


def test_without_a_connector_nothing_is_guessed() -> None:
    with pytest.raises(NamespaceError, match="out of reach"):
        shims.current_vllm_config()


def test_a_finished_connector_does_not_count() -> None:
    connector = Connector(0)
    with pytest.raises(NamespaceError, match="out of reach"):
        connector.deeper(3)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Nested:
    names: set[str]
    colour: Colour


def test_configuration_values_have_one_text() -> None:
    value = {"b": (1, 2.5, None, True), "a": Nested({"y", "x"}, Colour.RED), 3: Path("/p")}
    same = {3: Path("/p"), "a": Nested({"x", "y"}, Colour.RED), "b": [1, 2.5, None, True]}
    assert shims._plain(value) == shims._plain(same)
    assert shims._plain(value) == (
        '{"3":"/p","a":{"colour":"RED","names":["\\"x\\"","\\"y\\""]},"b":[1,2.5,null,true]}'
    )


def test_values_without_a_stable_text_are_refused() -> None:
    with pytest.raises(NamespaceError, match="no stable description"):
        shims._plain({"override": lambda config: config})


def test_rope_types_are_found_wherever_they_are() -> None:
    assert shims._rope_types({"rope_parameters": {"rope_type": "yarn", "factor": 4}}) == ["yarn"]
    assert shims._rope_types({"rope_scaling": {"type": "longrope"}}) == ["longrope"]
    per_kind = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear"},
            "sliding_attention": {"rope_type": "default"},
        }
    }
    assert sorted(shims._rope_types(per_kind)) == ["default", "linear"]
    nested = {"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}
    assert shims._rope_types(nested) == ["dynamic"]
    assert shims._rope_types({"hidden_size": 8, "rope_theta": 1e4}) == []
