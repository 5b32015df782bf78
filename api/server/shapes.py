"""Decodes a large body as its model has it.

A JSON parser builds an object for each value, and a body of 8 MiB may have millions of values that its model doesn't
know. So msgspec checks the shape of the model while it decodes: it stops at the first field that doesn't exist, and
builds no objects of free JSON, such as the data of an event. The model validates the rest.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from pydantic import BaseModel, BeforeValidator, ValidationError, WrapValidator
from pydantic.fields import FieldInfo

from api import problems
from api.server import bodies

_SCALARS: Final[Mapping[Any, Any]] = {
    str: str,
    bool: bool,
    int: int | float,  # strict models accept no float here, but msgspec would read 1.0 as 1
    float: int | float,
    types.NoneType: None,
}


class LargeBodies:
    """Decodes the large bodies of one model."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model
        shape = of_model(model)
        self._decoder = msgspec.json.Decoder(shape.type)
        self._plain = shape.plain

    def validated(self, content: bytes) -> BaseModel:
        """The model of a body. Raises `Problem`, which names one place if the body hasn't the shape of the model."""
        value = self._plain(bodies.decoded(self._decoder, content))
        try:
            return self._model.model_validate(value)
        except ValidationError as error:
            faults = error.errors(include_input=False, include_url=False)
            raise problems.from_faults([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from None


class Shape(NamedTuple):
    """What msgspec decodes, and how its result becomes the objects that a JSON parser would have made."""

    type: Any
    plain: Callable[[Any], Any]


def of_model(model: type[BaseModel]) -> Shape:
    """The shape of the objects that `model` validates. Values of the type `Any` stay encoded, as `msgspec.Raw`."""
    shapes = {field.alias or name: _of_field(field) for name, field in model.model_fields.items()}
    fields = [
        (name, shape.type)
        if field.is_required()
        else (name, shape.type if shape.type is msgspec.Raw else shape.type | msgspec.UnsetType, msgspec.UNSET)
        for (name, shape), field in zip(shapes.items(), model.model_fields.values(), strict=True)
    ]
    struct = msgspec.defstruct(model.__name__, fields, forbid_unknown_fields=True, kw_only=True)

    def plain(value: Any) -> dict[str, Any]:
        values = ((name, shape, getattr(value, name)) for name, shape in shapes.items())
        return {name: shape.plain(value) for name, shape, value in values if value is not msgspec.UNSET}

    return Shape(struct, plain)


def _of_field(field: FieldInfo) -> Shape:
    return _of(field.annotation, field.metadata)


def _of(annotation: Any, metadata: Iterable[Any] = ()) -> Shape:
    """The shape of the values of a type with `metadata`."""
    if any(isinstance(entry, BeforeValidator | WrapValidator) for entry in metadata):
        return _PARSED  # the validator decides what it accepts
    if hasattr(annotation, "__metadata__"):
        return _of(annotation.__origin__, annotation.__metadata__)
    if annotation is Any:
        return _FREE
    if annotation in _SCALARS:
        return Shape(_SCALARS[annotation], _unchanged)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return of_model(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return Shape(str, _unchanged)
    if origin is list:
        return _of_list(_of(arguments[0]), metadata)
    if origin in (Union, types.UnionType):
        return _of_union([_of(argument, metadata) for argument in arguments])
    return _PARSED


def _of_list(entry: Shape, metadata: Iterable[Any]) -> Shape:
    bounds = [bound.max_length for bound in metadata if hasattr(bound, "max_length")]
    entries = list[entry.type]  # type: ignore[name-defined]  # a type that is known only here
    return Shape(
        Annotated[entries, msgspec.Meta(max_length=min(bounds))] if bounds else entries,
        lambda values: [entry.plain(value) for value in values],
    )


def _of_union(shapes: Sequence[Shape]) -> Shape:
    """The models have unions of scalars and at most one list or object."""
    if any(shape.type is msgspec.Raw for shape in shapes):
        return _PARSED
    plain = next((shape.plain for shape in shapes if shape.plain is not _unchanged), _unchanged)
    return Shape(Union[tuple(shape.type for shape in shapes)], lambda value: value if value is None else plain(value))  # noqa: UP007


def _unchanged(value: Any) -> Any:
    return value


_FREE: Final = Shape(msgspec.Raw, _unchanged)
_PARSED: Final = Shape(msgspec.Raw, lambda value: bodies.parsed(bytes(value)))
