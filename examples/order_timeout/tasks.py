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


def ask_payment_provider(_order_id: int) -> None:
    """Stands for a last look at the provider's side: it takes its time, and a payment may arrive meanwhile."""
    time.sleep(PROVIDER_TAKES)
