"""One answer, as text and as tokens: `python examples/ask.py HOST:PORT PROMPT MAX_TOKENS`, also as a job of Ray:

ray job submit --address http://HEAD:8265 -- python examples/ask.py llm-diptych:50051 "The sea is" 24
"""

import argparse

from diptych.client import Client, Retry

arguments = argparse.ArgumentParser(description="One answer of a running cluster, as text and as tokens.")
arguments.add_argument("endpoint", help="HOST:PORT of a gateway")
arguments.add_argument("prompt")
arguments.add_argument("max_tokens", type=int)
asked = arguments.parse_args()
with Client(asked.endpoint, retry=Retry()) as client:
    answer = client.complete(asked.prompt, max_tokens=asked.max_tokens, temperature=0.0)
print(answer.text)
print(f"tokens: {list(answer.output.tokens)}")
