"""Processes that are killed, machines that lose power, disks that are full, gone or hang."""

import pytest

# Helpers assert, too; without this they would fail without saying why.
pytest.register_assert_rewrite("tests.crash.blocks", "tests.crash.processes")
