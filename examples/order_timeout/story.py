"""Eight orders: four are paid in time, one at the very last moment, three not at all, and one of those too late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from examples.app import app
from examples.stage import BaseStory, Check, Counts, Outcome
from multiq import State

from . import orders
from .shop import PAYMENT_TIME, OutOfStock, TooLate, deliver, pay, place_order

if TYPE_CHECKING:
    from examples.stage import Scene


CHAIN = 2  # jobs of a delivery


class Story(BaseStory):
    title = "order_timeout"
    queue = "orders"

    def play(self, scene: Scene) -> Outcome:
        orders.create_table()
        placed = [place_order("teapot") for _ in range(8)]
        delayed = app.queue("orders").stats().delayed
        scene.say(f"{len(placed)} orders placed: each cancels itself if unpaid for {PAYMENT_TIME:g} s")

        rolled_back = _refused("unicorn")
        scene.say("1 rolled back (out of stock): no timeout is left behind")
        queued_in_all = app.queue("orders").stats().delayed

        in_time, last_moment, unpaid = placed[:4], placed[4], placed[5:]
        answers = [pay(order) for order in in_time]
        scene.say(f"{answers.count('deleted')} paid in time: their timeouts are deleted")

        parcel = deliver(in_time[0])
        scene.say("1 is packed and shipped: a chain of two jobs")

        timeout = _timeout_of(last_moment)
        scene.until(lambda: app.queue("orders").peek(timeout).state is State.RESERVED, "the last moment has come")
        answer = pay(last_moment)
        scene.say("1 paid while its timeout ran: the order stays paid")

        delivered = parcel.result(timeout=30)
        scene.follow(len(placed) - len(in_time) + CHAIN)
        too_late = _pays_too_late(unpaid[0])
        scene.say(f"{len(unpaid)} unpaid cancelled themselves; paying now is too late")
        wanted = {**dict.fromkeys([*in_time, last_moment], "paid"), **dict.fromkeys(unpaid, "cancelled")}
        return Outcome(
            self.title,
            expected=Counts(queued=10, delayed=8, retried=0, cancelled=4, worked_off=6, buried=0),
            seen=scene.count(queued=len(placed) + CHAIN, delayed=delayed or 0, cancelled=answers.count("deleted")),
            checks=[
                Check("the rolled-back order left no job", rolled_back and queued_in_all == len(placed)),
                Check("paying at the last moment wins over the timeout", answer.startswith("it runs at this moment")),
                Check("the parcel was packed, then shipped", delivered == f"parcel {in_time[0]} is on its way"),
                Check("the chain is finished", parcel.info().state == "finished"),
                Check("a payment after the timeout is refused", too_late),
                Check("paid orders are paid, unpaid ones cancelled, none else", orders.states() == wanted),
            ],
        )


def _refused(item: str) -> bool:
    try:
        place_order(item)
    except OutOfStock:
        return True
    return False


def _pays_too_late(order: int) -> bool:
    try:
        pay(order)
    except TooLate:
        return True
    return False


def _timeout_of(order: int) -> str:
    with orders.transaction() as connection:
        job_id: str = connection.execute("SELECT timeout_job FROM orders WHERE id = ?", (order,)).fetchone()[0]
    return job_id
