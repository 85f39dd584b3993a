"""`response_format`: OpenAI's field that asks for an answer in JSON, any object or one of a schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from toolkit.infer.server.message_protocol import Strict, wrong_field


class NamedSchema(Strict):
    """A schema with the name that a client gives it. It is enforced with each value of `strict`."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The field. json_schema: with the type of this name only."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            needed = "needs" if self.type == "json_schema" else "has no"
            message = f"'response_format' of type {self.type} {needed} 'json_schema'"
            raise wrong_field("json_schema", message)
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must match; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return {"type": "object"} if self.type == "json_object" else None
