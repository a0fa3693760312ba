"""Hourly prices of machines, with date and source, and the cost of a picture at these prices.

A file (``--prices``, ``output.prices``) adds to those that ship with the package, such as a provider's list::

    {"l4": {"per_hour": 0.7068, "currency": "USD", "as_of": "2026-04", "source": "GCP g2-standard-4, on demand"}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from simpletune.system.gpus import CARDS, Card, cards_like
from simpletune.system.options import Option, UserError
from simpletune.system.package import ASSETS
from simpletune.system.strict_json import JsonError, parse


class Price(Option):
    """What a machine costs per hour."""

    per_hour: Annotated[float, Field(ge=0)]
    """Price of an hour."""
    as_of: Annotated[str, Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")]
    """Date of the price: YYYY-MM or YYYY-MM-DD."""
    source: Annotated[str, Field(min_length=1)]
    """Who charges this price, and for what."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] | None = None
    """Currency, such as USD; null: unspecified."""

    @property
    def words(self) -> str:
        """Price, date and source."""
        return f"{self.per_hour:g} {self.currency or ''}".rstrip() + f" per hour, as of {self.as_of}, {self.source}"


Prices = dict[str, Price]
"""Prices by name, in the order of their columns."""

SHIPPED = ASSETS / "prices.json"


def card_prices(file: Path | None = None, configured: str | None = None) -> Prices:
    """Return prices by lower-case card name; a user's file (of the command line, else ``output.prices``) overrides the
    prices that ship with this package."""
    prices = [read_prices(SHIPPED)]
    if file:
        prices.append(read_prices(file))
    elif configured:
        prices.append(read_prices(Path(configured), "output.prices"))
    return {name.lower(): price for each in prices for name, price in each.items()}


def card_price(card: Card, configured: str | None = None, file: Path | None = None) -> Price | None:
    """Return the price of a card as ``card_prices`` has it; None if unknown.

    For a card by the driver's name, the nearest card of the table by memory counts.
    """
    prices, names = card_prices(file, configured), [card.name]
    if card.name not in {each.name for each in CARDS}:
        like = sorted(cards_like(card.name), key=lambda each: abs(each.gib - card.gib))
        names += [each.name for each in like]
    return next((prices[name.lower()] for name in names if name.lower() in prices), None)


def read_prices(file: Path, option: str = "--prices") -> Prices:
    """Read a file of prices, which messages call by the option that names it. Raises UserError if it cannot be read, or
    a price lacks its date or source."""
    try:
        return TypeAdapter(Prices).validate_python(parse(file.read_bytes()))
    except (OSError, JsonError) as error:
        raise UserError(f"{option}: {file} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{option}: {file}: {'.'.join(map(str, first['loc']))}: {first['msg']}. A price has per_hour, as_of "
            "(YYYY-MM) and source"
        ) from None


def cost_of_image(seconds: float, per_hour: float) -> float:
    """Compute the cost of an image from its seconds, in the currency of the price."""
    return seconds * per_hour / 3600
