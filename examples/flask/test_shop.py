# test_shop.py
from multiq import testing

from shop import create_app, queue, send_receipt


def test_an_order_is_followed_by_its_receipt() -> None:
    web = create_app(MULTIQ_URL="memory://")
    client = web.test_client()
    with web.app_context(), testing.fake(queue.app) as enqueued:
        ref = client.post("/orders/7", headers={"X-User": "ann"}).json["job"]
        enqueued.assert_enqueued(send_receipt, (7,))

        enqueued.run()
        assert client.get(f"/jobs/{ref}", headers={"X-User": "ann"}).json["result"] == "receipt 7 is sent"
        assert client.get(f"/jobs/{ref}", headers={"X-User": "eve"}).status_code == 404
