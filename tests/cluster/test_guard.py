"""Keys and watched files, without a server."""

import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.frontend.auth import (
    RECHECK_S,
    Authenticator,
    KeyRefused,
    ReloadedFiles,
    TenantRefused,
    key_digests,
    read_keys,
)
from cluster.spec import GatewaySpec, SpecError

KEYS = ("one-key-of-many-letters", "another.key~with+signs/and==")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Authenticator:
    path = tmp_path_factory.mktemp("guard") / "keys"
    path.write_text("# mine\n" + "\n\n".join(f"  {key}\t" for key in KEYS))
    return Authenticator(GatewaySpec(api_keys_file=str(path)))


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", " BEARER   {} "])
@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_accepted(guard: Authenticator, form: str, key: str) -> None:
    assert guard.check(form.format(key)) == ""


@given(st.one_of(st.none(), st.text(), st.builds("Bearer {}".format, st.text()), st.sampled_from(KEYS)))
def test_anything_else_is_refused(guard: Authenticator, header: str | None) -> None:
    with pytest.raises(KeyRefused):
        guard.check(header)


@given(st.sampled_from(KEYS), st.data())
def test_a_part_of_a_key_is_refused(guard: Authenticator, key: str, data: st.DataObject) -> None:
    part = key[: data.draw(st.integers(0, len(key) - 1))]
    with pytest.raises(KeyRefused):
        guard.check(f"Bearer {part}")


def test_keys_are_stored_as_digests(guard: Authenticator) -> None:
    assert guard._keys is not None and guard._keys.current() == key_digests(dict.fromkeys(KEYS, ""))
    assert not any(key in repr(vars(guard._keys)) for key in KEYS)


def test_a_key_is_valid_for_its_tenant_only(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEYS[0]}   bank\n{KEYS[1]} *\n{KEYS[0][::-1]}\n")
    guard = Authenticator(GatewaySpec(api_keys_file=str(tmp_path / "keys")))
    of_bank, of_all, of_none = (f"Bearer {key}" for key in (*KEYS, KEYS[0][::-1]))
    assert guard.tenant(of_bank, "") == guard.tenant(of_bank, "bank") == "bank"
    assert (guard.tenant(of_all, ""), guard.tenant(of_all, "bank")) == ("", "bank")
    assert guard.tenant(of_none, "") == ""
    for key, named in ((of_bank, "eve"), (of_bank, "*"), (of_none, "bank")):
        with pytest.raises(TenantRefused, match=rf"not to '{re.escape(named)}'; leave the tenant out"):
            guard.tenant(key, named)
    with pytest.raises(KeyRefused):
        guard.tenant(None, "bank")


def test_a_key_of_two_tenants_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEYS[0]} bank\n{KEYS[0]} eve\n")
    with pytest.raises(SpecError, match=r"line 2 of .* has the key of another tenant") as caught:
        read_keys(str(tmp_path / "keys"))
    assert KEYS[0] not in str(caught.value)


def test_without_keys_everything_is_accepted() -> None:
    guard = Authenticator(GatewaySpec())
    assert guard.tenant(None, "anybody") == "anybody"
    assert guard.tls is None and not guard.has_keys


@given(st.text())
def test_any_file_has_keys_or_is_a_one_line_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any-keys"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert all(len(key) >= 16 for key in read_keys(str(path)))
    except SpecError as error:
        assert str(error).startswith("gateway.api_keys_file: ") and "\n" not in str(error)


def test_files_are_rechecked_at_intervals_and_errors_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now, reads = tmp_path / "file", [0.0], []
    path.write_text("first")

    def load() -> str:
        reads.append(now[0])
        if (text := path.read_text()) == "bad":
            raise SpecError("it is bad")
        return text

    watched = ReloadedFiles([str(path)], load, lambda: now[0])
    path.write_text("second, longer")
    assert watched.current() == "first", "too soon to look"
    now[0] += RECHECK_S
    assert [watched.current() for _ in range(3)] == ["second, longer"] * 3 and len(reads) == 2
    path.write_text("bad")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            now[0] += RECHECK_S
            assert watched.current() == "second, longer"
    received = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(reads) == 3 and received == ["it is bad; the previous content stays in use"]


def test_a_changed_symbolic_link_is_a_changed_file(tmp_path: Path) -> None:
    """As Kubernetes renews what is mounted: same name, same size."""
    now = [0.0]
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    link = tmp_path / "file"
    link.symlink_to("old")
    watched = ReloadedFiles([str(link)], link.read_text, lambda: now[0])
    (tmp_path / "turned").symlink_to("new")
    (tmp_path / "turned").replace(link)
    now[0] += RECHECK_S
    assert watched.current() == "new"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tls_cert_file": "/a"}, "tls_cert_file and tls_key_file come together; give tls_key_file too"),
        ({"tls_key_file": "/a"}, "tls_cert_file and tls_key_file come together; give tls_cert_file too"),
        ({"tls_client_ca_file": "/a"}, "give tls_cert_file and tls_key_file too"),
        ({"api_keys_file": "keys"}, "'keys' is read where the gateway runs, so it must begin with /"),
    ],
)
def test_certificate_and_key_that_do_not_match_are_refused(files: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        GatewaySpec(**files)  # type: ignore[arg-type]
    assert words in str(refused.value)
