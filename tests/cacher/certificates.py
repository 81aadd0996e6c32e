"""Test certificates: an authority, a server's, two of a trainer, another's, and one of another authority."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme

from bagpipe.config.sections import CacherConfig
from cacher.security import Access


@dataclass(frozen=True)
class Certificates:
    """Certificate files in a folder."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")

    @property
    def access(self) -> Access:
        """Access settings of a cacher that requires client certificates."""
        return Access(tls_cert=self.path("server"), tls_key=self.path("server-key"), tls_client_ca=self.path("ca"))

    def trainer(self, name: str = "trainer", *, timeout_s: float = 1.0) -> CacherConfig:
        """Access settings of a trainer with the certificate called `name`; "": without one."""
        return CacherConfig(
            timeout_s=timeout_s,
            tls_ca=self.path("ca"),
            tls_cert=self.path(name) if name else "",
            tls_key=self.path(f"{name}-key") if name else "",
        )


def make_certificates(folder: Path) -> Certificates:
    ours, other = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(str(folder / "ca.pem"))
    here = ("localhost", "127.0.0.1")
    for name, authority, names in (
        ("server", ours, here),
        ("trainer", ours, here),
        ("renewed", ours, here),
        ("neighbour", ours, ("neighbour.example",)),
        ("stranger", other, here),
    ):
        made = authority.issue_cert(*names)
        made.private_key_pem.write_to_path(str(folder / f"{name}-key.pem"))
        with (folder / f"{name}.pem").open("wb") as file:
            for blob in made.cert_chain_pems:
                file.write(blob.bytes())
    return Certificates(folder)
