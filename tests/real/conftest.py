"""One working directory for all documented commands: a run that one of them makes is read by others."""

import pytest

from real.checkout import Checkout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("reader"))
