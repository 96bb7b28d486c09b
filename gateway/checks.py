"""What a setting names and is used only later, tried before the gateway serves.

What cannot be used ends the start in one line that says what to do, instead of a trace then or of a
restart that fails when it is needed.
"""

from __future__ import annotations

import shlex
import shutil

from fleet.errors import StoreUnavailable
from fleet.store import open_store, store_address
from gateway.accounts import try_file
from gateway.settings import SettingsError
from gateway.settings_model import Settings


async def check_what_is_named(settings: Settings) -> None:
    """Raise SettingsError if the store, the access log or the restart command cannot be used."""
    _check_access_log(settings.log.access)
    _check_command(settings.restart.command)
    await _check_store(settings)


def _check_access_log(file: str | None) -> None:
    try:
        if file is not None:
            try_file(file)
    except OSError as error:
        raise SettingsError(
            f"FLEET_LOG__ACCESS: {file!r} cannot be written to: {error.strerror}; name a file that "
            "this user may write"
        ) from error


def _check_command(command: str | None) -> None:
    program = shlex.split(command)[0] if command else ""
    if program and "{" not in program and shutil.which(program) is None:
        raise SettingsError(
            f"FLEET_RESTART__COMMAND: {program!r} is no program that this user can run; give its "
            "path"
        )


async def _check_store(settings: Settings) -> None:
    where = store_address(settings.store)
    async with open_store(settings.store, settings.name) as store:
        try:
            await store.ping()
        except StoreUnavailable as error:
            raise SettingsError(
                f"the store {where} cannot be used: {_fact(error)}; start it there, or correct "
                "--store (FLEET_STORE)"
            ) from error
        try:
            # As every save does it; who finds the key there has been told of a write just now.
            await store.swap("start", expected=None, stamp="start", body=b"", ttl_s=1)
        except StoreUnavailable as error:
            raise SettingsError(
                f"the store {where} takes no writes: {_fact(error)}; give it memory and its user "
                "the right to write, or name the primary with --store (FLEET_STORE)"
            ) from error


def _fact(error: StoreUnavailable) -> str:
    """Return what Redis said, less the name of our script."""
    return str(error.__cause__ or error).partition(" script: ")[0].rstrip(".")
