"""A tiny prepared model for the daemons of these tests."""

from pathlib import Path

import pytest

from tests.fakes.tiny import prepare_tiny, write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model: a character of a prompt is a token."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    prepare_tiny(directory, write_tiny("llama", directory, max_position_embeddings=2048))
    return directory
