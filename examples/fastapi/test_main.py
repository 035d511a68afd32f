# test_main.py
from fastapi.testclient import TestClient
from multiq import testing

from main import web
from shop import jobs, send_receipt


def test_an_order_is_followed_by_its_receipt() -> None:
    with testing.fake(jobs) as enqueued, TestClient(web, headers={"X-User": "ann"}) as client:
        ref = client.post("/orders/7").json()["job"]
        enqueued.assert_enqueued(send_receipt, (7,))
        assert client.get(f"/jobs/{ref}").json()["status"] == "queued"

        enqueued.run()
        assert client.get(f"/jobs/{ref}").json()["result"] == "receipt 7 is sent"
        assert client.get(f"/jobs/{ref}", headers={"X-User": "eve"}).status_code == 404
