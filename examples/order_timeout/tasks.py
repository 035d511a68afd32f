"""The task that runs when the time to pay is over."""

from __future__ import annotations

import time

from examples.app import app

from . import orders

#: seconds that the payment provider takes to answer
PROVIDER_TAKES = 1.0


@app.task(queue="orders", priority=10)
def cancel_unpaid_order(order_id: int) -> None:
    """Cancel the order unless it was paid. The order's row decides, so running it late or twice does no harm."""
    ask_payment_provider(order_id)
    with orders.transaction() as connection:
        orders.close(connection, order_id, "cancelled")


@app.task(queue="orders")
def pack(order_id: int) -> str:
    """Pack a paid order, and return the label of the parcel. The next step of the chain gets the label."""
    return f"parcel {order_id}"


@app.task(queue="orders")
def ship(parcel: str) -> str:
    """Hand the parcel over, and return what the customer sees."""
    return f"{parcel} is on its way"


def ask_payment_provider(_order_id: int) -> None:
    """Stands for a slow request to the payment provider. A payment may arrive meanwhile."""
    time.sleep(PROVIDER_TAKES)
