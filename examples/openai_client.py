"""Asks a running cluster with the `openai` package: `diptych serve --http-port 8000`, then this program."""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="any")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why is the sea salty?"}],
    max_tokens=64,
    temperature=0,
    stream=True,
    extra_headers={"x-diptych-slo-class": "interactive", "x-diptych-ttft-ms": "2000"},
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
