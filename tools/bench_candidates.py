"""A candidate of a benchmark: a dispatcher, and what its configuration has beyond the shape.

On the command line NAME or NAME:KEY=VALUE:KEY=VALUE, such as direct:capacity_factor=1.2:expand=true. Keys are fields of
`DispatchConfig` that the shape does not decide, and the dispatcher's own options.
"""

from __future__ import annotations

import tomllib
import typing
from dataclasses import dataclass
from typing import Any

from moe_ep.config import DispatchConfig
from moe_ep.dispatch.registry import find_dispatcher
from moe_ep.errors import RecipeError, Unavailable
from moe_ep.schema import coerce, nearest, require

FIELDS = ("capacity_factor", "kernels", "num_sms")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One dispatcher, configured in one way.

    Attributes:
        name: of the dispatcher.
        pairs: keys and values, in their alphabetical order.
    """

    name: str
    pairs: tuple[tuple[str, Any], ...] = ()

    @property
    def api(self) -> str | None:
        """What a row's field of that name holds: the keys, such as "capacity_factor=1.2,expand=true"."""
        return ",".join(f"{key}={_text(value)}" for key, value in self.pairs) or None

    @property
    def values(self) -> dict[str, Any]:
        """Fields of a `DispatchConfig` or a `MoEConfig`."""
        fields: dict[str, Any] = {key: value for key, value in self.pairs if key in FIELDS}
        return fields | {"options": tuple(pair for pair in self.pairs if pair[0] not in FIELDS)}

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{key}={_text(value)}" for key, value in self.pairs)])


def parse_candidate(text: str) -> Candidate:
    """A candidate from the command line.

    Raises:
        RecipeError: a key that neither the configuration nor the dispatcher has, with the nearest one; a value of
            another type; or keys of a dispatcher that is not to be had.
    """
    name, *parts = text.split(":")
    values: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        require(bool(key and equals and value), f"dispatcher {text!r}: {part!r} is not KEY=VALUE")
        require(key not in values, f"dispatcher {text!r} has {key} twice")
        values[key] = _value(key, value, text)
    if values:
        own = _options(name, text)
        for key in values:
            require(
                key in FIELDS or key in own, f"dispatcher {text!r}: unknown key {key!r}; {nearest(key, FIELDS + own)}"
            )
    return Candidate(name, tuple(sorted(values.items())))


def _options(name: str, text: str) -> tuple[str, ...]:
    try:
        return find_dispatcher(name).capabilities.options
    except Unavailable as err:
        raise RecipeError(f"dispatcher {text!r}: {err}") from err


def _value(key: str, text: str, candidate: str) -> Any:
    """As TOML reads it, or the text as it stands; a field of the configuration in its own type."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if key not in FIELDS:
        return value
    return coerce(value, typing.get_type_hints(DispatchConfig)[key], f"dispatcher {candidate!r}: {key}")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
