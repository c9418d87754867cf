"""The secret of a launch: where it comes from, how it is stretched, and whether it is weak."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from meshrun.errors import HostError
from meshrun.host.named_files import read_small
from meshrun.host.own_variables import SECRET, SECRET_FILE
from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.wording import count

_SHORT = 16
"""A secret of fewer characters can be guessed."""
_LONG = 32
"""The length of a generated secret, which is longer than those that people choose."""
_ROUNDS = 600_000
_DRAW = "head -c 32 /dev/urandom | base64"


def find_secret(env: Mapping[str, str], config: RendezvousConfig) -> bytes:
    """Return the key that the launchers share, derived from the secret and the run id.

    Without a secret, the run id keeps apart launches that meet by mistake. A short secret is
    stretched, so that each guess is costly for somebody who has recorded a proof.

    Raises:
        HostError: If ``MESHRUN_SECRET_FILE`` cannot be read, or is empty.
    """
    text = read_secret(env, config)
    whole = f"meshrun {config.run_id or ''} {text}".encode(errors="surrogateescape")
    if 0 < len(text) < _LONG:
        return hashlib.pbkdf2_hmac("sha256", whole, b"meshrun", _ROUNDS)
    return hashlib.sha256(whole).digest()


def read_secret(env: Mapping[str, str], config: RendezvousConfig) -> str:
    """Return the secret as the user set it; "" for none.

    Raises:
        HostError: If ``MESHRUN_SECRET_FILE`` cannot be read, or is empty.
    """
    text, path = env.get(SECRET, ""), env.get(SECRET_FILE)
    if text or not path:
        return text or config.secret or ""
    text = _content(path)
    if not text:
        raise HostError(
            f"{SECRET_FILE} `{path}` is empty",
            hint=f"create it with `(umask 077; {_DRAW} > {shlex.quote(path)})` and copy it to every"
            " node",
        )
    return text


def secret_warnings(env: Mapping[str, str], config: RendezvousConfig) -> list[str]:
    """Return warnings about a secret that is weak, or that other users can read."""
    warnings = []
    text, path = read_secret(env, config), env.get(SECRET_FILE)
    if 0 < len(text) < _SHORT:
        warnings.append(
            f"the secret has only {count(len(text), 'character')} and could be guessed by whoever"
            f" impersonates node 0; `{_DRAW}` generates one of 44"
        )
    if path and not env.get(SECRET):
        with suppress(FileNotFoundError):  # removed once it was read
            mode = stat.S_IMODE(os.stat(path).st_mode)
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                warnings.append(
                    f"{SECRET_FILE} `{path}` is accessible to other users (mode {mode:04o});"
                    f" run `chmod 600 {shlex.quote(path)}`"
                )
    return warnings


@cache
def _content(path: str) -> str:
    """Return the text of a file, which is read once: it may be a pipe, as of ``<(pass ...)``."""
    try:
        return read_small(path).strip()
    except OSError as error:
        raise HostError(f"{SECRET_FILE} `{path}`: {error.strerror}") from error
