"""The connection to a cluster of Ray."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from wassail.errors import InputError

# Ray gives its machine's address to every server it starts, even if told 127.0.0.1, except where it
# supports one machine only: then all of them bind to loopback. The variable says so.
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def line_of(error: BaseException) -> str:
    """The first line of an error's text."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


class Link:
    """A connection to a Ray cluster: to the one at `address`, to the one this process is connected
    to, or to a new one.

    A new one belongs to this process, has `cpus` CPUs (default: those of the machine), listens on
    loopback only and ends with `close`, with its folder of temporary files. `ray` is the module.
    """

    def __init__(self, address: str | None = None, cpus: int | None = None) -> None:
        self._kept: dict[str, str | None] = {}
        self._folder: str | None = None
        self._term: Any = None
        if "ray" not in sys.modules and address is None:
            self._set({ONE_MACHINE: "0"})  # which ray reads when it is imported
        try:
            self.ray: Any = importlib.import_module("ray")
        except ImportError as error:
            self._restore()
            raise InputError(
                f'a cluster needs the package ray ({error}): pip install "wassail[ray]".'
            ) from None
        self.mine = False
        if self.ray.is_initialized():
            self._restore()
            if address not in (None, "auto", self.ray.get_runtime_context().gcs_address):
                raise InputError(
                    f"this process is connected to another cluster than {address!r}: "
                    "ray.shutdown() first."
                )
            return
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        self._before: Any = signal.getsignal(signal.SIGTERM)
        try:
            if address is None:
                self._start(cpus, quiet)
            else:
                self.ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            self._restore()
            self._remove()
            if isinstance(error, InputError):
                raise
            what = (
                "start a cluster on this machine"
                if address is None
                else f"reach a cluster at {address!r}"
            )
            raise InputError(
                f"ray could not {what} ({line_of(error)}): see what ray status says."
            ) from error
        self.mine = True
        self._listen()
        atexit.register(self.close)  # before ray's own end, for it would leave its files

    def _start(self, cpus: int | None, quiet: Mapping[str, Any]) -> None:
        self._set({ONE_MACHINE: "0", "RAY_USAGE_STATS_ENABLED": "0"})
        self._set({"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_TOKEN": _password()})
        # Ray turns it on, for us too.
        self._kept.setdefault("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE"))
        logging.getLogger("ray").setLevel(logging.ERROR)  # where it would tell
        self._folder = _short_folder()
        self.ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=self._folder,
            **quiet,
        )
        found = str(self.ray.util.get_node_ip_address())
        if not found.startswith("127.") and found != "::1":
            self.ray.shutdown()
            raise InputError(
                f"ray was imported before and would listen on {found}, which the network can "
                f"reach: set {ONE_MACHINE}=0 before, or ray.init() a cluster of your own."
            )

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self.mine:
            self.mine = False
            atexit.unregister(self.close)
            self.ray.shutdown()
            self._remove()
            if self._term is not None:
                with contextlib.suppress(ValueError):  # not in the main thread
                    signal.signal(signal.SIGTERM, self._term)
        self._restore()

    def _listen(self) -> None:
        """Take SIGTERM back from ray, which prints the stack of its machine code: end as
        `sys.exit` does.
        """
        was = self._before
        handler: Any = _leave if was in (None, signal.SIG_DFL) else was
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, handler)
            self._term = signal.SIG_DFL if was is None else was

    def _remove(self) -> None:
        """Remove the files of a cluster that was started here; its last processes may still be
        writing.
        """
        for _ in range(20 if self._folder else 0):
            shutil.rmtree(str(self._folder), ignore_errors=True)
            if not os.path.exists(str(self._folder)):
                break
            time.sleep(0.1)
        self._folder = None

    def _set(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            self._kept.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def _restore(self) -> None:
        for name, value in self._kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._kept = {}


def _leave(number: int, frame: Any) -> None:
    """What SIGTERM does while there is a cluster: everything that is open is closed."""
    sys.exit(128 + number)


def _short_folder() -> str:
    """A new folder for ray's sockets, whose paths may have hardly a hundred characters."""
    place = "/tmp" if os.access("/tmp", os.W_OK) else None
    return tempfile.mkdtemp(prefix="wassail-ray-", dir=place)


@cache
def _password() -> str:
    """One for the life of this process, in its environment only: ray would write one to the
    home directory, for all to read.
    """
    return os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
