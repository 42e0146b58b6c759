# SPDX-License-Identifier: Apache-2.0
import pytest
from optimizer_training import hybrid, streaming


@pytest.fixture
def make():
    """Build hybrid optimizers that are closed at the end."""
    built = []

    def build(model, **options):
        built.append(hybrid(model, **options))
        return built[-1]

    yield build
    for optimizer in built:
        optimizer.close()


@pytest.fixture
def offload():
    """Build offloaders that are closed at the end."""
    built = []

    def build(model, **options):
        built.append(streaming(model, **options))
        return built[-1]

    yield build
    for optimizer in built:
        optimizer.close()
