"""Both servers on one address, over a fake dispatcher; prints its ports, then the number of running requests.

python -m tests.frontend.behind_link ADDRESS STEP_S
"""

import asyncio
import sys

from cluster.frontend.servers import Servers
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.tokenizers import ByteTokenizer


async def main(address: str, step_s: float) -> None:
    dispatcher = FakeDispatcher(step_s=step_s)
    servers = Servers(gateway_context(dispatcher, http_port=0, host=address), ByteTokenizer)
    endpoint = await servers.open()
    print(endpoint.rpartition(":")[2], servers.http_url.rpartition(":")[2], flush=True)
    known = 0
    while True:
        if known != (known := len(dispatcher.running)):
            print(known, flush=True)
        await asyncio.sleep(0.05)


asyncio.run(main(sys.argv[1], float(sys.argv[2])))
