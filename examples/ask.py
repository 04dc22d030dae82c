"""One answer, as text and as tokens: `python examples/ask.py HOST:PORT PROMPT MAX_TOKENS`, also as a job of Ray:

ray job submit --address http://HEAD:8265 -- python examples/ask.py llm-diptych:50051 "The sea is" 24
"""

import sys

from cluster.api.again import Retry
from cluster.api.blocking import BlockingClient

endpoint, prompt, max_tokens = sys.argv[1:]
with BlockingClient(endpoint, retry=Retry()) as client:
    answer = client.complete(prompt, max_tokens=int(max_tokens), temperature=0.0)
print(answer.text)
print(f"tokens: {list(answer.output.tokens)}")
