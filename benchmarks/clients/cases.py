"""What each client library is asked to do. Runs in the clients' own environment: python cases.py URL MODEL NAME ...

Prints a line of JSON for each case: client, case, error (empty: it passed).
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]
HELLO, ASK, TELL = "Say hello.", "What is the weather in Paris?", "Ada is 36 years old."
LIMITS: dict[str, Any] = {"max_tokens": 96, "temperature": 0}
City = Literal["Paris", "London"]  # free text could go on up to the limit
Case = Callable[[], None]


class Person(BaseModel, extra="forbid"):  # a small model would add properties up to the limit
    name: Literal["Ada", "Bob"]
    age: int


def weather(city: City) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def check(condition: Any, what: Any = "") -> None:
    if not condition:
        raise AssertionError(str(what)[:400])


def openai() -> Sequence[Case]:
    import openai

    client, later = openai.OpenAI(base_url=URL), openai.AsyncOpenAI(base_url=URL)
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": HELLO}], **LIMITS}
    tell: Any = ask | {"messages": [{"role": "user", "content": TELL}]}
    call: Any = {
        "tools": [openai.pydantic_function_tool(Person)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }

    def chat() -> None:
        check(client.chat.completions.create(**ask).choices[0].message.content)

    def stream() -> None:
        parts = [each.choices[0].delta.content or "" for each in client.chat.completions.create(**ask, stream=True)]
        check("".join(parts) == client.chat.completions.create(**ask).choices[0].message.content)

    def tools() -> None:
        found = client.chat.completions.parse(**tell, **call).choices[0].message
        check(found.tool_calls and isinstance(found.tool_calls[0].function.parsed_arguments, Person), found)

    def structured() -> None:
        check(client.chat.completions.parse(**tell, response_format=Person).choices[0].message.parsed)

    def responses() -> None:
        asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 96}
        with client.responses.stream(input=HELLO, **asked) as events:
            text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
        check(text and text == client.responses.create(input=HELLO, **asked).output_text)
        check(client.responses.parse(input=TELL, text_format=Person, **asked).output_parsed)

    def asynchronous() -> None:
        async def all_of_them() -> None:
            whole = await later.chat.completions.create(**ask)
            parts = [
                each.choices[0].delta.content or ""
                async for each in await later.chat.completions.create(**ask, stream=True)
            ]
            check(whole.choices[0].message.content and whole.choices[0].message.content == "".join(parts))
            called = await later.chat.completions.parse(**tell, **call)
            check(called.choices[0].message.tool_calls)
            check((await later.chat.completions.parse(**tell, response_format=Person)).choices[0].message.parsed)

        asyncio.run(all_of_them())

    return chat, stream, tools, structured, responses, asynchronous


def langchain() -> Sequence[Case]:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, **LIMITS)
    responses_model = ChatOpenAI(model=MODEL, use_responses_api=True, **LIMITS)

    def chat() -> None:
        check(model.invoke(HELLO).content)

    def stream() -> None:
        check("".join(each.content for each in model.stream(HELLO)) == model.invoke(HELLO).content)

    def tools() -> None:
        found = model.bind_tools([tool(weather)], tool_choice="weather", strict=True).invoke(ASK)
        check(found.tool_calls and found.tool_calls[0]["name"] == "weather", found)

    def structured() -> None:
        check(isinstance(model.with_structured_output(Person).invoke(TELL), Person))

    def structured_by_call() -> None:
        check(isinstance(model.with_structured_output(Person, method="function_calling").invoke(TELL), Person))

    def responses() -> None:
        whole = responses_model.invoke(HELLO).text
        check(whole and "".join(each.text for each in responses_model.stream(HELLO)) == whole)

    return chat, stream, tools, structured, structured_by_call, responses


def langchain_anthropic() -> Sequence[Case]:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.tools import tool

    model = ChatAnthropic(model=MODEL, base_url=URL.removesuffix("/v1"), **LIMITS)

    def chat() -> None:
        check(model.invoke(HELLO).text)

    def stream() -> None:
        check("".join(each.text for each in model.stream(HELLO)) == model.invoke(HELLO).text)

    def tools() -> None:
        found = model.bind_tools([tool(weather)], tool_choice="weather").invoke(ASK)
        check(found.tool_calls and found.tool_calls[0]["name"] == "weather", found)

    def structured() -> None:
        check(isinstance(model.with_structured_output(Person, method="json_schema").invoke(TELL), Person))

    return chat, stream, tools, structured


def litellm() -> Sequence[Case]:
    import litellm

    common = {"model": f"openai/{MODEL}", "api_base": URL, **LIMITS}
    cities = {"type": "object", "properties": {"city": {"enum": ["Paris", "London"]}}, "required": ["city"]}
    parameters = cities | {"additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}

    def message(text: str, **more: Any) -> Any:
        found = litellm.completion(messages=[{"role": "user", "content": text}], **common, **more)
        return found if more.get("stream") else found.choices[0].message

    def chat() -> None:
        check(message(HELLO).content)

    def stream() -> None:
        parts = [each.choices[0].delta.content or "" for each in message(HELLO, stream=True)]
        check("".join(parts) == message(HELLO).content)

    def tools() -> None:
        (call, *_) = message(ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False).tool_calls
        check(json.loads(call.function.arguments)["city"])

    def structured() -> None:
        Person.model_validate_json(message(TELL, response_format=Person).content)

    def completion() -> None:
        asked = {"model": f"text-completion-openai/{MODEL}", "api_base": URL, "max_tokens": 8}
        check(litellm.text_completion(prompt="Once", **asked).choices[0].text)

    def responses() -> None:
        check(litellm.responses(input=HELLO, model=f"openai/{MODEL}", api_base=URL, max_output_tokens=48).output)

    return chat, stream, tools, structured, completion, responses


def instructor() -> Sequence[Case]:
    import instructor
    import openai

    def case(mode: Any) -> Case:
        def run() -> None:
            client = instructor.from_openai(openai.OpenAI(base_url=URL), mode=mode)
            ask: Any = {"messages": [{"role": "user", "content": TELL}], "max_retries": 0, **LIMITS}
            check(isinstance(client.chat.completions.create(model=MODEL, response_model=Person, **ask), Person))

        run.__name__ = mode.value
        return run

    return [case(mode) for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)]


def pydantic_ai() -> Sequence[Case]:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def agent(kind: Any = OpenAIChatModel, **more: Any) -> Any:
        return Agent(kind(MODEL, provider=OpenAIProvider(base_url=URL)), model_settings=LIMITS, **more)

    def chat() -> None:
        check(agent().run_sync(HELLO).output)

    def stream() -> None:
        async def text() -> str:
            async with agent().run_stream(HELLO) as found:
                return "".join([each async for each in found.stream_text(delta=True)])

        check(asyncio.run(text()) == agent().run_sync(HELLO).output)

    def tools() -> None:
        check(isinstance(agent(output_type=ToolOutput(Person)).run_sync(TELL).output, Person))

    def structured() -> None:
        check(isinstance(agent(output_type=NativeOutput(Person)).run_sync(TELL).output, Person))

    def responses() -> None:
        check(agent(OpenAIResponsesModel).run_sync(HELLO).output)

    return chat, stream, tools, structured, responses


def openai_agents() -> Sequence[Case]:
    import agents

    agents.set_tracing_disabled(True)

    def agent(kind: Any, settings: dict[str, Any] | None = None, **more: Any) -> Any:
        model = kind(MODEL, agents.AsyncOpenAI(base_url=URL))
        chosen = agents.ModelSettings(**LIMITS, **(settings or {}))
        return agents.Agent(name="helper", instructions="Help.", model=model, model_settings=chosen, **more)

    def tools_of(kind: Any) -> Case:
        def tools() -> None:
            called = []

            def weather(city: City) -> str:
                """The weather in a city."""
                called.append(city)
                return "sunny"

            settings = {"tool_choice": "required", "parallel_tool_calls": False}
            asked = agent(kind, settings, tools=[agents.function_tool(weather)])
            found = asyncio.run(agents.Runner.run(asked, ASK))
            check(called and found.final_output, found)

        tools.__name__ = f"tools of {kind.__name__}"
        return tools

    def chat() -> None:
        check(asyncio.run(agents.Runner.run(agent(agents.OpenAIChatCompletionsModel), HELLO)).final_output)

    def stream() -> None:
        async def text() -> str:
            found = agents.Runner.run_streamed(agent(agents.OpenAIChatCompletionsModel), HELLO)
            async for _ in found.stream_events():
                pass
            return str(found.final_output)

        check(asyncio.run(text()))

    def structured() -> None:
        asked = agent(agents.OpenAIChatCompletionsModel, output_type=Person)
        check(isinstance(asyncio.run(agents.Runner.run(asked, TELL)).final_output, Person))

    both = tools_of(agents.OpenAIChatCompletionsModel), tools_of(agents.OpenAIResponsesModel)
    return chat, *both, stream, structured


def llama_index() -> Sequence[Case]:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    kind = {"is_chat_model": True, "is_function_calling_model": True}
    model = OpenAILike(model=MODEL, api_base=URL, api_key="none", **kind, **LIMITS)

    def chat() -> None:
        check(model.chat([ChatMessage(HELLO)]).message.content)

    def stream() -> None:
        *_, last = model.stream_chat([ChatMessage(HELLO)])
        check(last.message.content == model.chat([ChatMessage(HELLO)]).message.content)

    def tools() -> None:
        found = model.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=ASK, tool_required=True)
        check(model.get_tool_calls_from_response(found)[0].tool_name == "weather")

    def structured() -> None:
        check(isinstance(model.as_structured_llm(Person).complete(TELL).raw, Person))

    def completion() -> None:
        check(model.complete("Once").text)

    return chat, stream, tools, structured, completion


CLIENTS: dict[str, Callable[[], Sequence[Case]]] = {
    each.__name__: each
    for each in (openai, langchain, langchain_anthropic, litellm, instructor, pydantic_ai, openai_agents, llama_index)
}


def main() -> None:
    os.environ.update(OPENAI_API_KEY="none", OPENAI_BASE_URL=URL, ANTHROPIC_API_KEY="none")
    for name in sys.argv[3:]:
        for case in CLIENTS[name]():
            error = ""
            try:
                case()
            except Exception as failed:  # any error is the case's result
                error = f"{type(failed).__name__}: {failed}"[:600]
            print(json.dumps({"client": name, "case": case.__name__, "error": error}), flush=True)


if __name__ == "__main__":
    main()
