# SPDX-License-Identifier: Apache-2.0
"""Runs a function on the ranks of one group, each a process of this machine, and ends all of them when one has failed.

Explained in docs/distributed.md.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reference_impl.device import Device

T = TypeVar("T")
Report = Callable[[Any], None]


class RankError(RuntimeError):
    """A rank is gone without a word, or its error cannot leave its process."""


def launch(
    ranks: int, device: Device, work: Callable[[Device, Report], T], on_report: Report = lambda _: None
) -> list[T]:
    """Return the results of `work` on each of `ranks` processes, by rank.

    It is called with the rank's device, of the type of `device` (of accelerators each rank has its own), under a
    process group of that type's own backend. An object that it passes to its second argument reaches `on_report` here.
    All of it has to be picklable. Raises the first error of any rank, with its traceback as a note, or RankError for
    a lost rank: the others' errors may be due to it. The remaining ranks are ended.
    """
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        connections: dict[Connection, Any] = {}
        for rank in range(ranks):
            here, there = spawned.Pipe()
            process = spawned.Process(
                target=_run,
                args=(rank, ranks, str(Path(folder) / "store"), device.torch_device.type, work, there),
                daemon=True,
            )
            process.start()
            ends.callback(process.join)
            ends.callback(process.kill)
            there.close()
            connections[here] = process
        return _results(connections, on_report)


def _results(connections: dict[Connection, Any], on_report: Report) -> list[Any]:
    """Listen until every rank has sent its result; raise an error that one sends instead."""
    results: dict[Connection, Any] = {}
    while len(results) < len(connections):
        for connection in wait([each for each in connections if each not in results]):
            assert isinstance(connection, Connection)
            try:
                kind, value = connection.recv()
            except EOFError:
                raise _gone(connections, connection) from None
            if kind == "report":
                on_report(value)
            elif kind == "done":
                results[connection] = value
            else:
                error = _error(*value)
                if ended := _ended(connections.keys() - {connection}):
                    raise _gone(connections, ended) from error
                raise error
    return [results[connection] for connection in connections]


def _ended(connections: Set[Connection]) -> Connection | None:
    """Return the connection of a rank that is gone, or None if within a second none is.

    Ranks that wait for it in a collective fail as it goes, and their errors may come first: a process closes its
    connections one after the other.
    """
    until = time.monotonic() + 1
    while (remaining_s := until - time.monotonic()) > 0:
        for connection in wait(connections, remaining_s):
            assert isinstance(connection, Connection)
            try:
                connection.recv()
            except EOFError:
                return connection
    return None


def _gone(connections: dict[Connection, Any], connection: Connection) -> RankError:
    process = connections[connection]
    process.join()
    return RankError(
        f"rank {list(connections).index(connection)} of {len(connections)} has ended with exit code "
        f"{process.exitcode}; expected its result; try fewer ranks, if the host's memory was short"
    )


def _run(
    rank: int,
    ranks: int,
    store: str,
    torch_type: str,
    work: Callable[[Device, Report], Any],
    parent: Connection,
) -> None:
    """Be one rank: send reports and the result, or the error."""
    # Ctrl-C reaches all processes of a terminal, and the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    try:
        device = _device(torch_type, rank)
        device.use_in_thread()
        dist.init_process_group(
            dist.get_default_backend_for_device(device.torch_device),
            store=dist.FileStore(store, ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=ranks,
        )
        parent.send(("done", work(device, lambda value: parent.send(("report", value)))))
    except BaseException as error:
        error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        try:
            parent.send(("failed", (type(error), error.args, error.__dict__)))
        except Exception:
            parent.send(("failed", (RankError, (f"rank {rank}: {type(error).__name__}: {error}",), {})))
    # A lost rank takes its connections along, and other ranks would fail. The parent ends all.
    with suppress(EOFError):
        parent.recv()
    os._exit(0)


def _device(torch_type: str, rank: int) -> Device:
    is_accelerator = Device.classes[torch_type].is_accelerator
    return Device.of(torch.device(torch_type, rank) if is_accelerator else torch_type)


def _error(kind: type[BaseException], args: Sequence[Any], state: dict[str, Any]) -> BaseException:
    """Return an error as it was in its process; its class may want other arguments than its message."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
