"""What the web process does: take an order, take a payment."""

from __future__ import annotations

import os

import multiq
from examples.app import app

from . import orders
from .tasks import cancel_unpaid_order

#: seconds that a customer has to pay
PAYMENT_TIME = float(os.environ.get("SHOP_PAYMENT_TIME", str(30 * 60)))

STOCK = {"teapot", "kettle", "cup"}


class OutOfStock(Exception):
    """The item cannot be ordered."""


class TooLate(Exception):
    """The order was cancelled before the payment came."""


def place_order(item: str) -> int:
    """The order and its timeout are written in one transaction: there is never one without the other."""
    with orders.transaction() as connection:
        order_id = orders.insert(connection, item)
        timeout = cancel_unpaid_order.options(delay=PAYMENT_TIME, connection=connection).enqueue(order_id)
        orders.note_timeout(connection, order_id, timeout.id)
        if item not in STOCK:
            raise OutOfStock(item)  # rolls back the order and the job
    return order_id


def pay(order_id: int) -> str:
    """Mark the order as paid and take its timeout back. Returns the outcome for the timeout.

    The order's row is changed first, and it alone decides: whatever the timeout does from then on finds a paid
    order. Deleting the job is tidiness, so both ways in which it can come too late are no error.
    """
    with orders.transaction() as connection:
        timeout_job = orders.close(connection, order_id, "paid")
    if timeout_job is None:
        raise TooLate(order_id)
    try:
        app.queue("orders").delete(timeout_job)
    except multiq.JobReserved:
        return "it runs at this moment, and will find the order paid"
    except multiq.JobNotFound:
        return "it ran already, just before the payment"
    return "deleted"
