"""What the web process does: take an order, take a payment."""

from __future__ import annotations

import os

import multiq
from examples.app import app

from . import orders
from .tasks import cancel_unpaid_order, pack, ship

#: seconds that a customer has to pay
PAYMENT_TIME = float(os.environ.get("SHOP_PAYMENT_TIME", str(30 * 60)))

STOCK = {"teapot", "kettle", "cup"}


class OutOfStock(Exception):
    """The item cannot be ordered."""


class TooLate(Exception):
    """The order was cancelled before the payment came."""


def place_order(item: str) -> int:
    """The order and its timeout are written in one transaction, so neither exists without the other."""
    with orders.transaction() as connection:
        order_id = orders.insert(connection, item)
        timeout = cancel_unpaid_order.options(delay=PAYMENT_TIME, connection=connection).enqueue(order_id)
        orders.note_timeout(connection, order_id, timeout.id)
        if item not in STOCK:
            raise OutOfStock(item)  # rolls back the order and the job
    return order_id


def deliver(order_id: int) -> multiq.FlowHandle:
    """Pack and ship a paid order: two jobs, of which the second runs when the first is done."""
    return multiq.chain(pack.s(order_id), ship.s(), name=f"order {order_id}").enqueue()


def pay(order_id: int) -> str:
    """Mark the order as paid, and delete the job that would cancel it. Returns what happened to that job.

    The order's row is changed first. If the job runs after that, it finds a paid order and does nothing. So it is no
    error if the job is running already, or has run, when it should be deleted.
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
