"""Values as people, YAML and papermill write them, read by the declared type of a setting."""

from __future__ import annotations

import ast
import types
import typing
from typing import Any

from dflash.errors import ConfigError


def is_none(value: Any) -> bool:
    """Whether this asks for nothing: None, '', 'none' or 'null'."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null"))


def coerce(name: str, value: Any, declared: Any) -> Any:
    """`value` as the declared type; papermill and YAML deliver '3e-4', 'false', '5,6,7' or '' as strings.

    Raises: ConfigError naming the parameter, what was got and what was wanted.
    """
    options = typing.get_args(declared) if typing.get_origin(declared) in (typing.Union, types.UnionType) else (declared,)
    if type(None) in options and is_none(value):
        return None
    for option in options:
        if option is type(None):
            continue
        try:
            return _as(value, option)
        except (TypeError, ValueError, SyntaxError):
            continue
    wanted = " or ".join(getattr(o, "__name__", str(o)) if typing.get_origin(o) is None else str(o) for o in options)
    raise ConfigError(f"{name} must be {wanted.replace('NoneType', 'None')}, got {value!r} ({type(value).__name__})")


def _as(value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        items = ast.literal_eval(value) if isinstance(value, str) and value.strip()[:1] in "([" else value
        if isinstance(items, str):
            items = [part for part in items.replace(" ", "").split(",") if part]
        if isinstance(items, (int, float)):
            items = [items]
        of = typing.get_args(kind)[0]
        return tuple(_as(item, of) for item in items)
    if kind is bool:
        if isinstance(value, bool):
            return value
        lowered = str(value).strip().lower()
        if lowered in ("true", "1", "yes", "on"):
            return True
        if lowered in ("false", "0", "no", "off"):
            return False
        raise ValueError(value)
    if kind is int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError(value)
        if isinstance(value, str):
            number = float(value)
            if not number.is_integer():
                raise ValueError(value)
            return int(value) if value.strip().lstrip("+-").isdigit() else int(number)
        return int(value)
    if kind is float:
        if isinstance(value, bool):
            raise ValueError(value)
        return float(value)
    if kind is str:
        if not isinstance(value, str):
            raise TypeError(value)
        return value
    if kind is list:
        if not isinstance(value, (list, tuple)):
            raise TypeError(value)
        return list(value)
    if kind is dict and isinstance(value, dict):
        return value
    raise TypeError(kind)
