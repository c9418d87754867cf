"""Secrets are masked in what meshrun prints."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stdout
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meshrun.host.printable import MASK, Mask, holds_secret, is_secret
from meshrun.plan.plan import LaunchPlan
from meshrun.report.plan_output import print_plan
from tests.plans import TRAIN, plan_of

SECRET_NAMES = (
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "APIKEY", "MY_KEYS"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "AUTH_TOKEN", "AWS_ACCESS_KEY_ID", "key", "wandb.api-key"),
    *("SLURM_JWT", "OMPI_MCA_orte_precondition_transports"),
)
PLAIN_NAMES = (
    *("PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PWD", "MAX_TOKENS", "MESHRUN_MESH"),
    *("--tokenizer", "RANK", "", "MAX_KEYSTROKES"),
)
secrets = st.text("QZJ7%=,;'\" $\\\u00e9\n", min_size=6, max_size=30)


def printed(shown: LaunchPlan, output_format: str, rank: str | None) -> str:
    with io.StringIO() as out, redirect_stdout(out):
        print_plan(shown, output_format, rank=rank)
        return out.getvalue()


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_secret_is_recognized_by_its_name(name: str) -> None:
    """Spelled as a variable or as an option."""
    assert is_secret(name)
    assert is_secret(f"--{name.lower().replace('_', '-')}")


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_a_name_that_is_not_secret_is_shown(name: str) -> None:
    """Even if it begins like a secret name."""
    assert not is_secret(name)


@given(st.sampled_from(SECRET_NAMES), secrets, st.sampled_from(["text", "json", "svg"]))
@pytest.mark.parametrize("rank", [None, "1"])
def test_a_plan_shows_no_secret_of_the_environment(
    rank: str | None, name: str, secret: str, output_format: str
) -> None:
    """In any format, wherever the secret stands on the command line."""
    values = {"mesh": "dp=2", "rdzv_conf": f"a=b{secret}".partition(",")[0], "role": secret}
    shown = plan_of(replace(TRAIN, args=(secret, f"--x={secret}", "--y", f"a{secret}b")), **values)
    if output_format == "svg" and rank is not None:
        return
    with mock.patch.dict(os.environ, {name: secret}):
        text = printed(shown, output_format, rank)

    plain = json.dumps(secret)[1:-1]
    assert secret not in text
    assert plain not in text


@given(st.sampled_from(SECRET_NAMES), st.text("QZJ7%+", min_size=1, max_size=30))
def test_the_value_of_a_secret_name_is_masked(name: str, secret: str) -> None:
    """Even if no environment variable has that value."""
    words = (f"--{name}={secret}", f"--{name}", secret, f"{name}={secret}", "--lr", "3")
    shown = Mask({}).words(words)

    assert shown == (f"--{name}={MASK}", f"--{name}", MASK, f"{name}={MASK}", "--lr", "3")
    assert Mask({}).text(f"id=7,{name}={secret}") == f"id=7,{name}={MASK}"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://ada:hunter2@host:80/a?b=c@d", "https://ada:***@host:80/a?b=c@d"),
        ("redis://:p:w@x@host/0", "redis://:***@host/0"),
        ("--db=postgresql://ada:hunter2@host/db", "--db=postgresql://ada:***@host/db"),
        ("https://host:80/user@x", "https://host:80/user@x"),
        ("https://ada@host", "https://ada@host"),
    ],
)
def test_the_password_of_a_url_is_masked(url: str, shown: str) -> None:
    """Whatever the option or variable is called."""
    assert Mask({}).words([url, url]) == (shown, shown)
    assert holds_secret("URL", url) == (url != shown)


@given(st.lists(st.text(max_size=8), max_size=6), st.dictionaries(st.text(), st.text(max_size=5)))
def test_what_is_not_secret_stays_as_it_is(words: list[str], env: dict[str, str]) -> None:
    """Short values of variables are not masked, as they occur everywhere."""
    if not any(is_secret(word) or "://" in word for word in words):
        assert Mask(env).words(words) == tuple(words)


def test_a_long_argument_is_searched_once() -> None:
    """Such as a file in base64, without a separator."""
    assert Mask({}).words([long := "A" * 1_000_000]) == (long,)
