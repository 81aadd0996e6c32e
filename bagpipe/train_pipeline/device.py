"""The device of a rank: ranks of one host share its devices out by their local rank."""

from __future__ import annotations

import torch

from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from bagpipe.util.environment import check_environment

__all__ = ["checked_device", "device_of_rank"]


def checked_device(device: torch.device | str) -> torch.device:
    """A device that a model can be on, as the user names it.

    Raises:
        InputError: it is no such device, or the packages that are installed do not fit it.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise InputError(f"device must be cpu, cuda or cuda:INDEX, got {device!r}")
    if found.type == "cuda":
        check_environment(str(found))
    return found


def device_of_rank(device: torch.device | str, membership: Membership | None) -> torch.device:
    """The device that a rank uses: for "cuda" with several ranks, that of its number on its host.

    Args:
        device: as the user names it; with an index it is taken as it is.
        membership: of this rank; None: there are no others.

    Raises:
        InputError: this process does not see the device.
    """
    found = torch.device(device)
    if found.type != "cuda":
        return found
    index: int | None = found.index
    if index is None and membership is not None:
        index = membership.local_rank
        found = torch.device("cuda", index)
    seen = torch.cuda.device_count()
    if (index or 0) >= seen:
        raise InputError(
            f"device is {found}, but this process sees {seen} CUDA devices"
            + ("" if membership is None else f", and has LOCAL_RANK {membership.local_rank}: each rank needs its own")
        )
    return found
