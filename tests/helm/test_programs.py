"""The programs that the other tests call are the pinned ones."""

import json

from tests.helm.programs import run


def test_helm_is_the_pinned_one() -> None:
    code, out, _ = run("helm", "version", "--template", "{{.Version}}")
    assert (code, out.strip()) == (0, "v4.3.1")


def test_kubectl_is_the_pinned_one() -> None:
    code, out, _ = run("kubectl", "version", "--client", "-o", "json")
    assert code == 0 and json.loads(out)["clientVersion"]["gitVersion"] == "v1.37.1"
