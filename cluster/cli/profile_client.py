"""The client of `diptych profile`: marks its requests, so that `diptych plan --from-cluster` does not count them."""

from collections.abc import AsyncGenerator
from typing import Unpack

from diptych.client import AsyncClient
from diptych.events import TextEvent
from diptych.options import Prompt, RequestOptions
from diptych.request_ids import PROFILE_PREFIX, new_id


class ProfileClient(AsyncClient):
    def generate(
        self, prompt: Prompt, *, apply_chat_template: bool = False, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[TextEvent, None]:
        options["request_id"] = f"{PROFILE_PREFIX}{new_id()}"
        return super().generate(prompt, apply_chat_template=apply_chat_template, **options)
