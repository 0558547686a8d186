"""Makes the harness and its fixtures known to the tests of all forks."""

import pytest

pytest.register_assert_rewrite("harness")

from harness import memory_that_was_never_written, oracle, qwen3  # noqa: E402, F401
