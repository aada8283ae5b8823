"""Building blocks of the configuration: the base of every section, and field types."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator


def number(value: Any) -> Any:
    """Refuse `true` for 1, and accept `1e3` for 1000: YAML reads it as a float."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Count = Annotated[int, BeforeValidator(number), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(number), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(number), Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, BeforeValidator(number), Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, BeforeValidator(number), Field(gt=0.0)]
NonNegative = Annotated[float, BeforeValidator(number), Field(ge=0.0)]


def _ascending(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError(f"range {list(value)} must be ascending")
    return value


Range = Annotated[tuple[Fraction, Fraction], AfterValidator(_ascending)]


class Section(BaseModel):
    """Base of every section: frozen, and a key that isn't declared is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        """A leading `~/` means the home directory, as in a shell."""
        return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value
