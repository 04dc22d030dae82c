"""Asks a running cluster from a program without an event loop: `diptych serve`, then this program.

It retries while the gateway is full or restarting. A broken stream continues where it was.
"""

from diptych.client import Client, DiptychError, Retry, TextDelta

with Client("127.0.0.1:50051", retry=Retry(patience_s=120.0)) as client:
    client.wait_ready(timeout_s=60)
    for event in client.generate("The sea is", max_tokens=32, temperature=0.8, seed=7):
        if isinstance(event, TextDelta):
            print(event.text, end="", flush=True)
    print()
    for index, answer in client.batch(["One, two,", "Red, green,"], max_tokens=8, temperature=0.0):
        print(index, answer if isinstance(answer, DiptychError) else repr(answer.text))
