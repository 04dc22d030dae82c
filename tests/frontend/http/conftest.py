from collections.abc import AsyncIterator

import pytest

from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients, opened


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
async def there(dispatcher: FakeDispatcher) -> AsyncIterator[Clients]:
    async with opened(dispatcher) as (clients, _):
        yield clients
