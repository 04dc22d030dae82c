"""The chart's notes: three ways to call the gateway, with the release's TLS files and keys, in every mode."""

import json
import shlex
from functools import cache
from pathlib import Path

import pytest

from tests.cli.commands import command_of
from tests.helm.chart import CHART, pods, rendered, values
from tests.helm.programs import run

# values file: (TLS, own CA, client certificates, API keys)
GUARDS = {
    "native": (False, False, False, False),
    "native-guarded": (True, True, False, True),
    "native-mutual-tls": (True, False, True, False),
    "native-odd-names": (True, True, True, True),
    "kuberay": (False, False, False, False),
    "kuberay-guarded": (True, True, True, True),
    "external": (False, False, False, False),
    "external-ipv6": (False, False, False, False),
}
EACH = pytest.mark.parametrize("name", GUARDS)


@cache
def notes(name: str, *options: str) -> str:
    code, out, err = run(
        "helm", "install", "release", CHART, "--namespace", "llm", "--dry-run=client", "-f", values(name), *options
    )
    assert code == 0, err
    return out.partition("NOTES:")[2]


def commands(name: str) -> list[list[str]]:
    """Each command as a list of words, in order."""
    return [shlex.split(line) for line in notes(name).splitlines() if line.startswith("  ")]


def diptych_arguments(name: str) -> list[list[str]]:
    """The arguments of each `diptych` command."""
    return [words[words.index("diptych") + 1 :] for words in commands(name) if "diptych" in words]


@EACH
def test_three_commands_name_their_endpoints(name: str) -> None:
    full = "true" if name == "native-odd-names" else "release-diptych"
    tls, *_ = GUARDS[name]
    inside = f"grpcs://{full}.llm.svc:50051" if tls else f"{full}.llm:50051"
    outside = "grpcs://localhost:50051" if tls else "127.0.0.1:50051"
    given = [(each[0], each[each.index("--endpoint") + 1]) for each in diptych_arguments(name)]
    assert given == [("generate", inside), ("status", outside), ("status", inside)]
    assert f"kubectl -n llm port-forward svc/{full} 50051:50051".split() in commands(name)


@EACH
def test_commands_name_the_files_that_they_need(name: str) -> None:
    _, own_ca, certificates, keys = GUARDS[name]
    needed = {"--ca": own_ca, "--cert": certificates, "--cert-key": certificates, "--key-file": keys}
    for command, *words in diptych_arguments(name):
        assert {option: option in words for option in needed} == needed
        known = {option for parameter in command_of(command).params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
    assert (" > ca.crt" in notes(name)) == own_ca
    job = next(words for words in commands(name) if words[:3] == ["ray", "job", "submit"])
    assert ("--working-dir" in job) == any(needed.values()), "a job has no other files"


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("native", "http://127.0.0.1:8265"),
        ("kuberay", "http://127.0.0.1:8265"),
        ("external", "http://ray-head.ray.svc:8265"),
        ("external-ipv6", "http://[fd00::1]:8265"),
    ],
)
def test_a_job_is_submitted_to_the_serving_ray(name: str, address: str) -> None:
    job = next(words for words in commands(name) if words[:3] == ["ray", "job", "submit"])
    assert job[3:5] == ["--address", address]
    forwarded = [words[4] for words in commands(name) if words[-1] == "8265:8265"]
    heads = {"native": ["svc/release-diptych-head"], "kuberay": ["svc/release-diptych-head-svc"]}
    assert forwarded == heads.get(name, [])


def test_pools_without_a_memory_request_are_named() -> None:
    assert "Pods of prefill, decode request no memory" in notes("native")
    assert "Pods of a100 request no memory" in notes("native-gpu")
    assert "request no memory" not in notes("native", "--set", "podDefaults.resources.requests.memory=8Gi")
    assert "request no memory" not in notes("external")


def test_of_several_models_calls_name_one(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    pools = [{"name": "a", "role": "mixed"}, {"name": "b", "role": "mixed", "model": "other/coder"}]
    own.write_text(json.dumps({"cluster": {"model": "smollm2-135m", "pools": pools}}))
    for options, ending in ((("-f", str(own)), " --model smollm2-135m"), ((), "")):
        (call,) = (line for line in notes("native", *options).splitlines() if "diptych generate" in line)
        assert call.endswith(f"release-diptych.llm:50051{ending}")
        (smoke,) = (spec for name, spec in pods(rendered(values("native"), *options)) if name.endswith("-smoke"))
        assert smoke["containers"][0]["command"][-1].endswith(f"--temperature 0{ending}")
    assert "serves smollm2-135m, other/coder (" in notes("native", "-f", str(own))
