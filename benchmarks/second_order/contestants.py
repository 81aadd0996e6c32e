"""Optimizers that are compared, each with the same number of settings that are tried.

Tries are few and spread widely. The ranges of those that had their best try at an edge were moved after a first pass
over the sample: SGD and both K-FACs. Rows have the same optimizer and rate everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

__all__ = ["ADAGRAD", "CONTESTANTS", "NUM_TRIES", "VARIANTS", "Contestant", "contestant_of", "flag_of"]

Settings = Mapping[str, float | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An optimizer of the dense part.

    Attributes:
        name: of it.
        flags: values of `optim` keys that all its tries share.
        tries: values of other keys.
    """

    name: str
    flags: Mapping[str, str]
    tries: tuple[Settings, ...]

    def flags_of(self, settings: Settings) -> list[str]:
        """Command-line flags of one try."""
        return [word for key, value in {**self.flags, **settings}.items() for word in (f"--optim.{key}", str(value))]


_MOMENTUM = {"dense": "sgd", "momentum": "0.9"}
_KFAC = {"precondition": "kfac"}

#: Baseline of the comparisons.
ADAGRAD = "adagrad"


def _rates(*rates: float) -> tuple[Settings, ...]:
    return tuple({"dense_lr": rate} for rate in rates)


#: SGD with momentum shows what preconditioning does to the optimizer that K-FAC wraps. A rate matters to `kfac-sgd`
#: only while kappa does not limit the step. Adagrad divides by the size of the gradients, so it takes no limit.
CONTESTANTS: Mapping[str, Contestant] = {
    each.name: each
    for each in (
        Contestant(
            name=ADAGRAD, flags={"dense": "adagrad"}, tries=_rates(0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
        ),
        Contestant(
            name="adamw",
            flags={"dense": "adamw", "weight_decay": "0.01"},
            tries=_rates(0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032),
        ),
        Contestant(name="sgd", flags=_MOMENTUM, tries=_rates(0.03, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)),
        Contestant(
            name="kfac-sgd",
            flags={**_MOMENTUM, **_KFAC},
            tries=tuple(
                {"kfac_damping": damping, "kfac_kappa": kappa, "dense_lr": rate}
                for damping, (kappa, rate) in product(
                    (0.01, 0.1), ((0.00001, 0.1), (0.0001, 0.1), (0.0001, 0.3), (0.001, 0.3))
                )
            ),
        ),
        Contestant(
            name="kfac-adagrad",
            flags={"dense": "adagrad", "kfac_kappa": "0", **_KFAC},
            tries=tuple(
                {"kfac_damping": damping, "dense_lr": rate}
                for damping, rate in product((0.01, 0.1), (0.02, 0.04, 0.08, 0.16))
            ),
        ),
    )
}

#: Tries of each.
NUM_TRIES = 8

#: Name -> contestant whose chosen settings it has, and what differs: not tried for itself.
VARIANTS: Mapping[str, tuple[str, Settings]] = {
    "kfac-sgd/10/100": ("kfac-sgd", {"kfac_factor_every": 10, "kfac_inverse_every": 100}),
    "kfac-adagrad/10/100": ("kfac-adagrad", {"kfac_factor_every": 10, "kfac_inverse_every": 100}),
}


def contestant_of(name: str, settings: Settings) -> list[str]:
    """Flags of a contestant or of a variant of it, with the settings chosen for the contestant."""
    base, more = VARIANTS.get(name, (name, {}))
    return CONTESTANTS[base].flags_of({**settings, **more})


def flag_of(settings: Settings) -> str:
    """Settings as a table shows them."""
    short = {"dense_lr": "lr", "kfac_damping": "damping", "kfac_kappa": "kappa"}
    return ", ".join(f"{short[key]} {value:g}" for key, value in settings.items())
