"""What every part of the fleet file is."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A part of the fleet file: frozen, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )
