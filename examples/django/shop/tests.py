# shop/tests.py
from django.test import TestCase
from multiq import testing
from multiq.contrib.django import get_app

from shop.tasks import send_receipt


class OrderTests(TestCase):
    def test_an_order_is_followed_by_its_receipt(self) -> None:
        with testing.fake(get_app()) as jobs:
            with self.captureOnCommitCallbacks(execute=True):
                job = self.client.post("/orders/teapot/").json()["job"]
            jobs.assert_enqueued(send_receipt.module_path, queue="mail")

            jobs.run()
            answer = self.client.get(f"/receipts/{job}/").json()
            self.assertEqual(answer, {"status": "SUCCESSFUL", "sent": "a receipt for one teapot"})
