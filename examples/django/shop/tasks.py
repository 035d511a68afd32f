# shop/tasks.py
from multiq.contrib.django import task, task_options

from shop.models import Order


@task(queue_name="mail")
@task_options(max_attempts=5)
def send_receipt(order: int) -> str:
    return f"a receipt for one {Order.objects.get(pk=order).item}"
