"""One working directory for all documented commands, since some of them read runs created by others."""

import pytest

from real.checkout import Checkout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("reader"))
