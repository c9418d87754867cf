"""The secret of a launch: where it is from, how it is stretched, and whether it is weak."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping

from meshrun.errors import HostError
from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.wording import count

_SHORT = 16
"""Characters of a secret that can be found by guessing."""
_LONG = 32
"""Length of a generated secret, longer than people choose."""
_ROUNDS = 600_000
_DRAW = "head -c 32 /dev/urandom | base64"


def find_secret(env: Mapping[str, str], config: RendezvousConfig) -> bytes:
    """Return the secret of this launch, if there is one.

    Without a secret, the name of the launch keeps launches apart that meet by mistake. One that a
    person has thought of is stretched, so that each guess at it costs whoever has heard a proof.

    Raises:
        HostError: If ``MESHRUN_SECRET_FILE`` cannot be read, or is empty.
    """
    text = read_secret(env, config)
    whole = f"meshrun {config.run_id or ''} {text}".encode(errors="surrogateescape")
    if 0 < len(text) < _LONG:
        return hashlib.pbkdf2_hmac("sha256", whole, b"meshrun", _ROUNDS)
    return hashlib.sha256(whole).digest()


def read_secret(env: Mapping[str, str], config: RendezvousConfig) -> str:
    """Return the secret as it was given; "" for none.

    Raises:
        HostError: If ``MESHRUN_SECRET_FILE`` cannot be read, or is empty.
    """
    text, path = env.get("MESHRUN_SECRET", ""), env.get("MESHRUN_SECRET_FILE")
    if text or not path:
        return text or config.secret or ""
    try:
        with open(path, errors="surrogateescape") as file:
            text = file.read().strip()
    except OSError as error:
        raise HostError(f"MESHRUN_SECRET_FILE `{path}`: {error.strerror}") from error
    if not text:
        raise HostError(
            f"MESHRUN_SECRET_FILE `{path}` is empty",
            hint=f"create it with `{_DRAW} > {path}` and copy it to every node",
        )
    return text


def secret_warnings(env: Mapping[str, str], config: RendezvousConfig) -> list[str]:
    """Return warnings about a secret that can be read."""
    doubts = []
    text, path = read_secret(env, config), env.get("MESHRUN_SECRET_FILE")
    if 0 < len(text) < _SHORT:
        doubts.append(
            f"the secret has only {count(len(text), 'character')} and could be guessed by whoever"
            f" impersonates the first node; `{_DRAW}` generates one of 44"
        )
    if path and not env.get("MESHRUN_SECRET"):
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            doubts.append(
                f"MESHRUN_SECRET_FILE `{path}` is accessible to other users (mode {mode:04o});"
                f" run `chmod 600 {path}`"
            )
    return doubts
