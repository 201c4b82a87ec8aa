# SPDX-License-Identifier: Apache-2.0
"""Base of everything that is stored in the API server."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


def _camel(name: str) -> str:
    return to_camel(name).replace("Url", "URL")


class ApiModel(BaseModel):
    """What is stored in the API server: camelCase there, snake_case here."""

    model_config = ConfigDict(alias_generator=_camel, populate_by_name=True, extra="ignore", frozen=True)


def _decimal(text: str) -> str:
    float(text)
    return text


#: A number as decimal text: the API has no floats.
Decimal = Annotated[str, AfterValidator(_decimal)]
