# shop.py
import os

import multiq
from multiq.contrib.sqlalchemy import Outbox
from sqlalchemy import String, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(String(50))
    is_confirmed: Mapped[bool] = mapped_column(default=False)


app = multiq.App(os.environ.get("SHOP_QUEUE", "sqlite:///jobs.db"))
engine = create_engine(os.environ.get("SHOP_DATABASE", "sqlite:///shop.db"))
outbox = Outbox(app, engine, metadata=Base.metadata)


@app.task(queue="mail")
def confirm(order_id: int) -> None:
    with Session(engine) as session, session.begin():
        session.get_one(Order, order_id).is_confirmed = True


def place_order(item: str) -> multiq.JobHandle:
    with Session(engine) as session, session.begin():
        order = Order(item=item)
        session.add(order)
        session.flush()  # the order gets its id
        job = confirm.options(connection=session).enqueue(order.id)
        if item == "unicorn":
            raise LookupError("out of stock")
    return job


def confirmed() -> list[str]:
    with Session(engine) as session:
        return list(session.scalars(select(Order.item).where(Order.is_confirmed)))


if __name__ == "__main__":
    Base.metadata.create_all(engine)
    print(place_order("teapot").queue)
