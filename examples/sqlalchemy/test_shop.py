# test_shop.py
from multiq import testing
from shop import Base, app, confirm, engine, outbox, place_order


def test_an_order_is_followed_by_its_confirmation() -> None:
    Base.metadata.create_all(engine)
    with testing.fake(app) as enqueued:
        place_order("teapot")
        outbox.relay()
        assert [job.task for job in enqueued.enqueued] == [confirm.name]
        enqueued.run()
