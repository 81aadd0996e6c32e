"""`redact`: text without the passwords of its URLs. Every text, and every `repr`, that may show a URL passes here.

redis://user:secret@host      unix:///socket?password=secret  ──redact──> redis://user:***@host  …?password=***
StoreConfig(url=…, …)         ──redacted_repr──> StoreConfig(url='redis://user:***@host', …)
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

__all__ = ["OPEN_OPTIONS", "has_password", "redact", "redacted_repr"]

#: Options of a URL whose values are no secrets.
OPEN_OPTIONS = frozenset(
    {"db", "username", "ssl_cert_reqs", "ssl_check_hostname", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
)
_HIDDEN = "***"
#: A comma starts another URL only before a scheme.
_NEXT_URL = re.compile(r"(,\s*)(?=[a-z][a-z+]*://)")
_PASSWORD = re.compile(r"(://[^:@]*:).*@", re.DOTALL)
#: Values of options that are not known to be harmless: `passwrod=` holds a password too.
_SECRET_OPTION = re.compile(rf"([?&](?!(?:{'|'.join(sorted(OPEN_OPTIONS))})=)[^=&]*=)[^&]*")


def redact(text: str) -> str:
    """The text with every password of its URLs replaced by stars. Never raises."""
    if "://" not in text:
        return text
    return "".join(map(_redact_url, _NEXT_URL.split(text)))


def _redact_url(text: str) -> str:
    # By pattern, because a URL in an error message is often unparsable. Up to the last @, because a password that was
    # not percent-encoded can contain one.
    return _SECRET_OPTION.sub(rf"\1{_HIDDEN}", _PASSWORD.sub(rf"\1{_HIDDEN}@", text))


def has_password(store_url: str) -> bool:
    """Whether one of a store's URLs, separated by commas, holds a password.

    Not for other URLs: an option that stores do not know counts as a secret.
    """
    return redact(store_url) != store_url


def redacted_repr(record: Any) -> str:
    """A dataclass's usual `repr`, with its texts redacted."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.repr}
    shown = [
        f"{name}={redact(value)!r}" if isinstance(value, str) else f"{name}={redact(repr(value))}"
        for name, value in values.items()
    ]
    return f"{type(record).__qualname__}({', '.join(shown)})"
