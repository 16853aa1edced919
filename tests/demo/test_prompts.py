"""The demo's prompts share what they should share, and nothing else."""

from __future__ import annotations

import pytest

from kvvault.demo.prompts import TENANTS, conversations, project_text


def test_the_text_is_long_and_always_the_same() -> None:
    text = project_text()
    assert len(text) > 50_000
    assert text == project_text()


@pytest.mark.parametrize("text", [project_text(), "A short text, used again and again. "])
def test_all_begin_alike_and_each_goes_on_differently(text: str) -> None:
    prompts = conversations(text)
    assert [p.tenant for p in prompts] == [TENANTS[0], TENANTS[0], TENANTS[1], TENANTS[1]]
    assert len({p.prompt[:3000] for p in prompts}) == 1
    assert len({p.prompt[:3200] for p in prompts}) == len(prompts)
    assert all(len(p.prompt) > 12_000 for p in prompts)
    for tenant in TENANTS:
        assert len({p.salt for p in prompts if p.tenant == tenant}) == 1
    assert len({p.salt for p in prompts}) == len(TENANTS)


def test_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="text"):
        conversations("")
